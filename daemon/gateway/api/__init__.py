"""The routes, a file for each group of OpenAI's API; request bodies enter, job options leave."""
