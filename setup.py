"""Metadata of torch_kevolve: the one home of name, dependencies, extras and entry points."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^VERSION = "(.+)"$', (HERE / "torch_kevolve" / "settings.py").read_text(), re.M)
assert VERSION is not None

setup(
    name="torch_kevolve",
    version=VERSION[1],
    description="A torch.compile backend that evolves kernels, proves them against eager and caches the winners",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_packages(include=["torch_kevolve", "torch_kevolve.*"]), "torch_kevolve.kernels_cache"],
    package_dir={"torch_kevolve.kernels_cache": "kernels_cache"},
    package_data={
        "torch_kevolve": ["**/*.h", "**/*.md", "py.typed"],
        "torch_kevolve.kernels_cache": ["**/*"],
    },
    exclude_package_data={"": ["**/__pycache__/*", "*.pyc"]},
    install_requires=[
        "torch>=2.11,<2.14",
        "triton>=3.6; platform_system == 'Linux'",
        "sympy>=1.13",
        "networkx>=3",
        "diskcache>=5.6",
        "numpy>=1.26",
        "click>=8.1",
        "rich>=13",
        "platformdirs>=4",
        "psutil>=5.9",
        "jinja2>=3.1",
    ],
    extras_require={
        "test": ["pytest>=8", "pytest-benchmark>=5", "pytest-xdist>=3.6", "hypothesis>=6.100", "setuptools", "wheel"],
        "nvml": ["nvidia-ml-py>=12"],  # how busy a GPU is, through torch.cuda.utilization
        "check": ["ruff==0.17.6", "mypy==2.4.1"],
    },
    entry_points={
        "torch_dynamo_backends": ["kevolve = torch_kevolve.backend:kevolve"],
        "console_scripts": ["kevolve = torch_kevolve.cli:main"],
    },
)
