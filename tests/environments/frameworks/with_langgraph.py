"""A graph of LangGraph with a tool; prints how often it has asked the model.

It finds it by the variables that a job gives to its agents.
"""
# mypy: ignore-errors

from __future__ import annotations

import json
import sys

from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def read(cell: int) -> str:
    """Reads a cell."""
    return str(cell * 7)


model = ChatOpenAI(model="policy").bind_tools([read])
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([read]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
made = graph.compile()
state = made.invoke({"messages": [("user", "Which number is in cell 2?")]})
state = made.invoke({"messages": [*state["messages"], ("user", "Sure?")]})
turns = sum(isinstance(one, AIMessage) for one in state["messages"])
sys.stdout.write(json.dumps({"turns": turns}))
