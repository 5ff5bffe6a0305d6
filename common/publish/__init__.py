"""What is made of the stored runs: text to attach, advice, tables, feeds, pages."""
