"""The HTML page, TensorBoard, and reports."""
