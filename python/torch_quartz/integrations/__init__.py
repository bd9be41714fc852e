"""What makes other parts of PyTorch and other packages know the device; ``patches.py`` lists every change."""
