"""The version of torch-quartz (CMakeLists.txt and pyproject.toml read it here)."""

__version__ = "0.1.0"
