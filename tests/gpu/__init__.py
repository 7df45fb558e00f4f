"""What only a GPU can show; see conftest.py for how to run it."""
