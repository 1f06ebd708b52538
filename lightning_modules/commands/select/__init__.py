"""Select documents by their scores."""
