"""Metadata of the distribution `asrd`. Nothing is probed here."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+?)"', (HERE / "asrd" / "__init__.py").read_text(encoding="utf-8"), re.M)
assert VERSION is not None
VIZ = ["pandas>=2.2"]
SUDOKU = ["reasoning-gym>=0.1.25"]  # to train tiny-sudoku; its puzzles for scoring are in the package
EVAL = ["lm-eval[math]==0.4.13", "rouge-score>=0.1.2"]
TEST = ["pytest>=9", "hypothesis>=6", "pytest-benchmark>=5", "pytest-xdist>=3.8", "playwright>=1.49"]
TEST += ["ruff>=0.17", "mypy>=2"]
SERVE = ["fastapi>=0.115", "uvicorn>=0.34", "prometheus-client>=0.21"]
RAY = ["ray[serve,data]==2.60.*", *SERVE]
TEST += [*RAY, "openai>=2"]
TEST += ["setuptools>=77", "triton>=3.7; platform_system == 'Linux'", *VIZ, *EVAL, *SUDOKU]

setup(
    name="asrd",
    version=VERSION[1],
    description="Anchor-supervised revocable decoding for diffusion LLMs: training-free, drop-in, batched",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The asrd developers",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["diffusion language models", "parallel decoding", "revocable decoding", "LLaDA", "Dream", "transformers"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Intended Audience :: Developers",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Text Processing :: Linguistic",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["asrd", "asrd.*", "asrd_kernels", "asrd_kernels.*"]),
    package_data={
        "asrd": [
            "py.typed",
            "models/packaged/*/*",
            "eval/*.csv",
            "lab/sudoku/held_out.txt",
            "viewer/*.html",
            "viewer/*.css",
            "viewer/*.js",
            "serve/page/*.html",
            "serve/page/*.css",
            "serve/page/*.js",
        ],
        "asrd_kernels": ["py.typed"],
    },
    install_requires=[
        "torch>=2.7",
        "transformers>=5.22,<6",
        "accelerate>=1.10",
        "safetensors>=0.8",
        "matplotlib>=3.9",
        "tqdm>=4.66",
        "rich>=14",
    ],
    extras_require={
        "flash": ["flash-attn>=2.8"],
        "viz": VIZ,
        "eval": EVAL,
        "sudoku": SUDOKU,
        "serve": SERVE,
        "ray": RAY,
        "test": TEST,
    },
    entry_points={"console_scripts": ["asrd=asrd.cli:main"]},
)
