"""Looking ahead: this machine measured, and what strategies would take on it or on any other."""
