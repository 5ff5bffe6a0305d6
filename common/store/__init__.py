"""What was seen: from a log to a verdict, receipts, and what they say of each release."""
