"""What a run will need, before it starts: memory, time, disk and money. No torch."""
