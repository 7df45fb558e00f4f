"""`tandem sample`: a policy's answers to prompts, scored, in a file."""
