"""LangChain's standard tests of a chat model, for ChatOpenAI. Argument: the URL.

It runs pytest on itself.
"""
# mypy: ignore-errors

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL = "WARMD_TEST_URL"


class TestChatOpenAI(ChatModelIntegrationTests):
    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        return {
            "model": "tools",
            "base_url": os.environ[URL],
            "api_key": "unused",
            "temperature": 0,
            "max_retries": 0,
            "stream_usage": True,
            "max_tokens": 200,
        }

    # The model is not trained on images, audio or PDF files; the flags for these are false.
    @property
    def supports_json_mode(self):
        return True


if __name__ == "__main__":
    os.environ[URL] = sys.argv[1]
    sys.exit(pytest.main(["-q", "-rsxf", "-p", "no:cacheprovider", str(Path(__file__))]))
