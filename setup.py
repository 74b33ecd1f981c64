"""The package, its dependencies and where its files lie. Tool settings are in pyproject.toml."""

import re
import zlib
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "hybridflow/__init__.py").read_text(encoding="utf-8"))[1]
KERNELS = ROOT / "hybridflow/rollout/cpu"
SOURCES = sorted(path.name for path in KERNELS.glob("*.[ch]"))
CHECKSUM = zlib.crc32(b"".join((KERNELS / name).read_bytes() for name in SOURCES))

setup(
    name="hybridflow",
    version=VERSION,
    description="RL post-training of language models on HPC clusters: Megatron-Core inside, Slurm outside",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    packages=[
        *find_packages(include=["hybridflow", "hybridflow.*"]),
        # Data only. Installed inside the package, where hybridflow/shipped.py finds them.
        "hybridflow.launch.recipes",
        "hybridflow.slurm",
    ],
    package_dir={"hybridflow.launch.recipes": "launch/recipes", "hybridflow.slurm": "slurm"},
    package_data={
        "hybridflow.launch.recipes": ["*.yaml"],
        # The name of a folder is the version of the library of charts in it.
        "hybridflow.report": ["assets/page.*", "assets/uplot-*/*"],
        "hybridflow.rollout.cpu": ["*.c", "*.h"],
        "hybridflow.slurm": ["*.sbatch", "*.sh"],
    },
    # Without a compiler the package is installed all the same, and decodes more slowly on a CPU.
    ext_modules=[
        Extension(
            "hybridflow.rollout.cpu._kernels",
            [f"hybridflow/rollout/cpu/{name}" for name in SOURCES if name.endswith(".c")],
            depends=[f"hybridflow/rollout/cpu/{name}" for name in SOURCES],
            # Who loads it compares this with the source that lies beside it.
            define_macros=[("HF_SOURCE", f"{CHECKSUM}u")],
            extra_compile_args=["-O3", "-fopenmp", "-Wno-psabi", "-fno-math-errno", "-fno-trapping-math"],
            extra_link_args=["-fopenmp", "-lm"],
            optional=True,
        )
    ],
    entry_points={"console_scripts": ["hybridflow = hybridflow.__main__:main"]},
    install_requires=[
        # Process groups in the order of a mesh, not of rank numbers: new_group(sort_ranks=) came with 2.12.
        "torch>=2.12",
        # Pinned: we pass process groups to its internals, and redirect its CUDA calls where there is no CUDA; it keeps
        # neither stable between releases.
        "megatron-core==0.16.1",
        # Imported by megatron-core, and not declared by it.
        "einops",
        # Our own.
        "h5py",
        "matplotlib",
        "mpi4py",
        "numpy",
        "psutil",
        "pyyaml",
        "safetensors",
        "sentencepiece",
        "tensorboard",
    ],
    extras_require={
        # Apex is not listed: PyPI's package of that name is another one. The docs give NVIDIA's git address.
        # The releases that megatron-core 0.16.1 is written against; hybridflow/parallel/accelerators.py has them too.
        "gpu": ["transformer-engine[pytorch]>=2.9,<2.12"],
        "hf": ["tokenizers", "transformers>=5", "datasets", "pillow", "pyarrow"],
        "data": ["datasets", "fsspec", "jinja2", "pyarrow"],
        "s3": ["fsspec", "s3fs"],
        "kafka": ["confluent-kafka"],
        "serve": ["starlette", "uvicorn"],
        "vllm": ["vllm"],
        "prometheus": ["prometheus_client"],
        "wandb": ["wandb>=0.30"],
        "math": ["math-verify>=0.9"],
        "docs": ["mkdocs-material", "mkdocstrings[python]", "playwright", "rich"],
        "dev": [
            *(
                "confluent-kafka",
                "datasets",
                "fsspec",
                "hypothesis",
                "jinja2",
                "math-verify",
                "mkdocs-material",
                "mkdocstrings[python]",
                "flask",
                "flask-cors",
                "moto[s3]",
                "mpich",
                "mypy",
                "peft",
                "pillow",
                "playwright",
            ),
            *("prometheus_client", "pyarrow", "pytest", "pytest-xdist", "rich", "ruff", "s3fs", "scipy", "starlette"),
            *("transformers>=5", "types-PyYAML", "uvicorn", "wandb"),
        ],
    },
)
