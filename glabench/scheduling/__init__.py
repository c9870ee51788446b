"""Scheduling: one loop drives workers through the cells of runs, rounds, and revisions in turns."""
