"""The routes, one file per group of OpenAI's API: request bodies in, job options out."""
