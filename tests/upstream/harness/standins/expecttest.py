"""Stand-in for the ``expecttest`` package, used where it is not installed.

``torch.testing._internal.common_utils`` imports ``expecttest`` for its ``TestCase`` base class. The conformance
harness only reads operator databases and never runs such a test case, so the names have to exist and nothing else.
"""

import unittest

ACCEPT = False


class TestCase(unittest.TestCase):
    """Base class with the two methods that PyTorch's own test case overrides or calls."""

    longMessage = True

    def assertExpectedInline(self, actual, expect, skip=0):
        """Compare `actual` with `expect`; unlike the real package this never rewrites the source file."""
        self.assertMultiLineEqual(expect, actual)

    def assertExpectedRaisesInline(self, exc_type, callable, expect, *args, **kwargs):
        """Check that `callable` raises `exc_type` with the message `expect`."""
        with self.assertRaises(exc_type) as caught:
            callable(*args, **kwargs)
        self.assertExpectedInline(str(caught.exception), expect)
