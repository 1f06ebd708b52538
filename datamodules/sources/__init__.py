"""Sources of documents: files, URLs and hub datasets."""
