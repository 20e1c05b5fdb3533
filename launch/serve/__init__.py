"""`burst-rt serve`: a model of transformers over ranks, for clients of OpenAI's protocol."""
