"""Reports, made from records: tables for the terminal, CSV, Markdown, figures."""
