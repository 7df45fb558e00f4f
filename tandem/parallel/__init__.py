"""Many ranks: who is there, how weights lie over them, what travels between them."""
