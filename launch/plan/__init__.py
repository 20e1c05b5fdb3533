"""Looking ahead: measuring this machine, and forecasting strategies on it or on any other."""
