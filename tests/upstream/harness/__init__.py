"""Harness of the conformance sweep: PyTorch's own operator, module and optimizer databases against quartz."""
