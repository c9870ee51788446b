"""Reports, from records alone: tables for the terminal, CSV, Markdown, figures."""
