"""HTTP below the routes: connections, authorization, bounded bodies, errors in OpenAI's shape."""
