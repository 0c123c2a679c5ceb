"""One replica on several hosts: how they find and trust each other, and what they tell each other."""
