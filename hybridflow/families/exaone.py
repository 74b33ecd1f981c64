"""EXAONE 4: norms behind the blocks alone, and queries and keys normalized head by head.

The large model has windows in three of four layers, and no rotary position embedding in the others.
"""

from hybridflow.families.family import COMMON_KEYS, NO_DROPOUT, Family
from hybridflow.families.olmo import OLMO2

EXAONE4 = Family(
    name="exaone4",
    causal="Exaone4ForCausalLM",
    scorer="Exaone4ForSequenceClassification",
    keys=COMMON_KEYS,
    defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    always={"pre_norms": False, "post_norms": True, "qk_norm": True},
    computed=NO_DROPOUT,
    window="most_layers",
    global_rope=False,
    rules=OLMO2.rules,
)
