"""MiniMax-M2: queries and keys normalized over all heads together, in part rotated, and experts chosen with a bias."""

from hybridflow.families.family import (
    ATTENTION,
    COMMON_KEYS,
    EMBEDDINGS,
    NO_DROPOUT,
    NORMS,
    QK_NORM,
    Family,
    experts,
    in_layer,
)

MINIMAX_M2 = Family(
    name="minimax_m2",
    causal="MiniMaxM2ForCausalLM",
    scorer=None,
    keys={
        **COMMON_KEYS,
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "rotary_dim": "rotary_dim",
    },
    aliases={"num_experts": "num_local_experts"},
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 196608,
        "tie_word_embeddings": False,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "rope_theta": 5000000.0,
    },
    always={
        "qk_norm": True,
        "qk_norm_over": "projection",
        "router_score": "sigmoid",
        "router_bias": True,
        "normalized_experts": True,
    },
    computed={
        **NO_DROPOUT,
        "router_jitter_noise": (0.0,),
        # ``transformers`` computes these whatever the file says, and other readers go by it.
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "scoring_func": ("sigmoid",),
        "use_routing_bias": (True,),
        "shared_intermediate_size": (0,),
    },
    scalings=("linear", "llama3", "yarn"),
    rules=(
        *EMBEDDINGS,
        *NORMS,
        *ATTENTION,
        *QK_NORM,
        *experts("block_sparse_moe", "w1", "w3", "w2"),
        in_layer("mlp.router.expert_bias", "block_sparse_moe.e_score_correction_bias"),
    ),
)
