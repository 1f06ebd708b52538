"""What people look at: the HTML page, TensorBoard, and reports."""
