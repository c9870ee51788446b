"""Scheduling: many cells, driven through workers; runs, rounds, and revisions in turns, all by one loop."""
