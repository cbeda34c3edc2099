"""Installs ``ds_tileoverlap``; the tested version ranges come from ``ds_tileoverlap/versions.py``."""

import os
import runpy

from setuptools import setup

versions = runpy.run_path("ds_tileoverlap/versions.py")
requirements = {name: versions["requirement"](name) for name in versions["TESTED"]}
ahead_of_time = {}
example = ["matplotlib", "ninja"]
finetune = [*example, *(requirements[name] for name in ("transformers", "peft", "accelerate"))]
if os.environ.get("DS_BUILD_TILEOVERLAP") == "1":
    from torch.utils.cpp_extension import BuildExtension

    builder = runpy.run_path("op_builder/tileoverlap.py")["TileOverlapBuilder"]()
    ahead_of_time = dict(ext_modules=[builder.builder()], cmdclass={"build_ext": BuildExtension})

setup(
    name="ds_tileoverlap",
    version=versions["VERSION"],
    description="A drop-in for deepspeed.moe.layer.MoE that overlaps expert GEMMs with their exchanges",
    long_description=open("README.md", encoding="utf-8").read(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=[
        "ds_tileoverlap",
        *(f"ds_tileoverlap.{name}" for name in ("bench", "ckpt", "planning", "trace", "op_builder")),
    ],
    package_dir={"ds_tileoverlap.op_builder": "op_builder"},
    package_data={"ds_tileoverlap": ["csrc/*", "planning/profiles/*"]},
    python_requires=f">={versions['TESTED']['python'][0]}",
    entry_points={"console_scripts": ["ds-tileoverlap = ds_tileoverlap.cli:main"]},
    install_requires=[
        *(requirements[name] for name in ("torch", "triton", "deepspeed")),
        "pyyaml",
        "rich",
        "safetensors",
        "tqdm",
    ],
    extras_require={
        "example": example,
        "finetune": finetune,
        "plan": ["matplotlib", "scipy"],
        "test": [*finetune, "markdown-it-py", "pytest>=8", "ruff==0.17.6", "scipy"],
        "benchmark": ["markdown-it-py", "matplotlib", requirements["transformers"]],
    },
    **ahead_of_time,
)
