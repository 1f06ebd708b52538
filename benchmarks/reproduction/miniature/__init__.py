"""The paper's claims in miniature."""
