"""All families. A new one is a table in a file of its own, and a line here."""

from __future__ import annotations

from hybridflow.families.deepseek import DEEPSEEK_V3
from hybridflow.families.dots import DOTS1
from hybridflow.families.ernie import ERNIE4_5
from hybridflow.families.exaone import EXAONE4
from hybridflow.families.family import Family
from hybridflow.families.gemma import GEMMA, GEMMA2, GEMMA3_TEXT, GEMMA4_TEXT
from hybridflow.families.glm import GLM, GLM4, GLM4_MOE, GLM4_MOE_LITE
from hybridflow.families.gpt_oss import GPT_OSS
from hybridflow.families.llama import LLAMA
from hybridflow.families.minimax import MINIMAX_M2
from hybridflow.families.mistral import MISTRAL
from hybridflow.families.mixtral import MIXTRAL
from hybridflow.families.olmo import OLMO2, OLMO3
from hybridflow.families.olmoe import OLMOE
from hybridflow.families.phi3 import PHI3
from hybridflow.families.qwen2 import QWEN2
from hybridflow.families.qwen2_moe import QWEN2_MOE
from hybridflow.families.qwen3 import QWEN3
from hybridflow.families.qwen3_5 import QWEN3_5_MOE_TEXT, QWEN3_5_TEXT, QWEN3_NEXT
from hybridflow.families.qwen3_moe import QWEN3_MOE
from hybridflow.families.seed_oss import SEED_OSS
from hybridflow.families.smollm3 import SMOLLM3

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GEMMA, GEMMA2, GEMMA3_TEXT, GEMMA4_TEXT, OLMO2, OLMO3, GLM, GLM4),
        *(SMOLLM3, SEED_OSS, ERNIE4_5, EXAONE4, QWEN3_5_TEXT, QWEN3_5_MOE_TEXT, QWEN3_NEXT),
        *(MIXTRAL, QWEN3_MOE, QWEN2_MOE, OLMOE, GPT_OSS, GLM4_MOE, MINIMAX_M2, DEEPSEEK_V3, GLM4_MOE_LITE, DOTS1),
    )
}

BY_TYPE = {name: family for family in FAMILIES.values() for name in (family.name, *family.others)}
"""Values of ``model_type`` and the families of their models."""
