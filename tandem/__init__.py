"""Tandem: from a pretrained language model to an assistant with human feedback."""
