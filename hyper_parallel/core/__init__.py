"""What the Trainer's parts share."""
