"""What is measured against the authors' code, and the paper's claims."""
