"""Phi-3 and Phi-4: fused projections, LongRoPE, and a sliding window; in Phi-4-mini a part of each head is rotated."""

from hybridflow.families.family import COMMON_KEYS, EMBEDDINGS, FUSED_FEED_FORWARD, NO_DROPOUT, NORMS, Family, in_layer

PHI3 = Family(
    name="phi3",
    causal="Phi3ForCausalLM",
    scorer="Phi3ForSequenceClassification",
    keys=COMMON_KEYS,
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "partial_rotary_factor": 1.0,
        "pad_token_id": 32000,
    },
    computed={**NO_DROPOUT, "resid_pdrop": (0.0,), "embd_pdrop": (0.0,)},
    window="all",
    scalings=("longrope",),
    rules=(
        *EMBEDDINGS,
        *NORMS,
        in_layer("self_attention.linear_qkv.weight", "self_attn.qkv_proj.weight", form="fused_qkv"),
        in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
        *FUSED_FEED_FORWARD,
    ),
)
