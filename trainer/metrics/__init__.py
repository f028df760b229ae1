"""What a run measures of itself: metrics.jsonl, its times and what they hint at."""
