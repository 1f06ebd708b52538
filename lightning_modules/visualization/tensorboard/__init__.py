"""TensorBoard panels: documents with their key tokens as text and tables, and figures over all documents."""
