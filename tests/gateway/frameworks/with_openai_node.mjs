// OpenAI's own client for Node: chats and responses, streamed and not, and parsed. Argument: the URL.

import assert from "node:assert/strict";

import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const MODEL = "tools";
const QUESTION = "What is the weather in Paris, and what is 20 + 22?";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "unused", maxRetries: 0 });
let called = [];

const functions = {
  weather({ city }) {
    called.push(["weather", city]);
    return "18 degrees";
  },
  add({ a, b }) {
    called.push(["add", a, b]);
    return String(a + b);
  },
};
const about = [
  ["weather", "Get the weather in a city.", { city: { type: "string" } }],
  ["add", "Add two numbers.", { a: { type: "integer" }, b: { type: "integer" } }],
].map(([name, description, properties]) => ({
  name,
  description,
  parameters: { type: "object", properties, required: Object.keys(properties) },
}));

function check(answer, what) {
  assert.deepEqual(called.sort(), [["add", 20, 22], ["weather", "Paris"]], what);
  assert.match(answer, /18 degrees in Paris/, what);
  assert.match(answer, /42/, what);
  called = [];
  console.log(`${what}: ${answer}`);
}

const messages = [{ role: "user", content: QUESTION }];
const asked = { model: MODEL, messages, temperature: 0 };
const tools = about.map((one) => ({ type: "function", function: one }));

// The client runs the tools itself, and sends back what it has read.
const runnable = about.map((one) => ({
  type: "function",
  function: { ...one, function: functions[one.name], parse: JSON.parse },
}));
check(await client.chat.completions.runTools({ ...asked, tools: runnable }).finalContent(), "run");
const runner = client.chat.completions.runTools({ ...asked, tools: runnable, stream: true });
let streamed = "";
runner.on("content", (delta) => (streamed += delta));
const answer = await runner.finalContent();
assert.equal(streamed, answer);
check(answer, "run, streamed");

// The stream helper puts together what the chunks have.
const stream = client.chat.completions.stream({ ...asked, tools });
const whole = [];
stream.on("tool_calls.function.arguments.done", (call) => whole.push(call));
const choice = (await stream.finalChatCompletion()).choices[0];
assert.equal(choice.finish_reason, "tool_calls");
assert.equal(whole.length, 2);
const results = choice.message.tool_calls.map((call) => ({
  role: "tool",
  tool_call_id: call.id,
  content: functions[call.function.name](JSON.parse(call.function.arguments)),
}));
const last = await client.chat.completions.create({
  ...asked,
  tools,
  messages: [...messages, choice.message, ...results],
});
assert.equal(last.choices[0].finish_reason, "stop");
check(last.choices[0].message.content, "stream helper");

// Arguments and answers that the client checks and parses.
const parsedTools = [
  zodFunction({ name: "weather", description: about[0].description, parameters: z.object({ city: z.string() }) }),
  zodFunction({
    name: "add",
    description: about[1].description,
    parameters: z.object({ a: z.number().int(), b: z.number().int() }),
  }),
];
const { message } = (await client.chat.completions.parse({ ...asked, tools: parsedTools })).choices[0];
assert.deepEqual(
  message.tool_calls.map((call) => call.function.parsed_arguments),
  [{ city: "Paris" }, { a: 20, b: 22 }],
);
const numbers = z.object({ a: z.number().int(), b: z.number().int() });
const toParse = [{ role: "user", content: "Write 20 + 22 as JSON." }];
const found = await client.chat.completions.parse({
  ...asked,
  messages: toParse,
  response_format: zodResponseFormat(numbers, "numbers"),
});
assert.deepEqual(found.choices[0].message.parsed, { a: 20, b: 22 });

// Responses.
const ofResponses = about.map((one) => ({ type: "function", strict: false, ...one }));
for (const isStreamed of [false, true]) {
  const input = [{ role: "user", content: QUESTION }];
  const request = () => ({ model: MODEL, input, tools: ofResponses, temperature: 0 });
  const ask = async () =>
    isStreamed ? client.responses.stream(request()).finalResponse() : client.responses.create(request());
  const { output } = await ask();
  const calls = output.filter((item) => item.type === "function_call");
  assert.equal(calls.length, 2);
  input.push(...output);
  for (const call of calls) {
    input.push({
      type: "function_call_output",
      call_id: call.call_id,
      output: functions[call.name](JSON.parse(call.arguments)),
    });
  }
  check((await ask()).output_text, `response, ${isStreamed ? "streamed" : "whole"}`);
}
const text = { format: zodTextFormat(numbers, "numbers") };
const response = await client.responses.parse({ model: MODEL, input: toParse, text, temperature: 0 });
assert.deepEqual(response.output_parsed, { a: 20, b: 22 });
