// The package `openai` for Node. See `checks.mjs` for how to run it.

import OpenAI, { toFile } from "openai";
import { LengthFinishReasonError } from "openai/error";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";

import {
    BASE_URL, CLOSE, Day, EMBEDDING_MODEL, KEY, MESSAGES, MODEL, QUESTION, STRUCTURED_TOKENS, Weather, all, assert, check,
    refused, run, unit,
} from "./checks.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: KEY, maxRetries: 0, timeout: 60_000 });
const SHORT = { model: MODEL, messages: MESSAGES, max_tokens: 16, seed: 1 };
const STRUCTURED = { ...SHORT, max_tokens: STRUCTURED_TOKENS };
const RESPONSE = { model: MODEL, input: QUESTION, max_output_tokens: 16, temperature: 0 };
const TOOLS = [zodFunction({ name: "Weather", parameters: Weather, description: "Tells the weather of a city." })];
const FUNCTIONS = TOOLS.map(({ type, function: { name, parameters } }) => ({ type, name, parameters, strict: true }));

// One call, which surely ends. Of several calls a model with random weights may make as many as there are tokens.
const REQUIRED = { tool_choice: "required", parallel_tool_calls: false };

const ask = (changes = {}) => client.chat.completions.create({ ...SHORT, ...changes });
const text = (answer) => answer.choices[0].message.content;
const joined = (chunks) => chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");

check("chat", async () => {
    const answer = await ask();
    assert.match(answer.id, /^chatcmpl-/);
    assert.equal(answer.object, "chat.completion");
    assert.ok(["stop", "length"].includes(answer.choices[0].finish_reason));
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
});

check("chat stream with usage", async () => {
    const chunks = await all(await ask({ stream: true, stream_options: { include_usage: true } }));
    const whole = await ask();
    assert.equal(joined(chunks), text(whole));
    assert.deepEqual(chunks.at(-1).choices, []);
    assert.equal(chunks.at(-1).usage.total_tokens, whole.usage.total_tokens);
});

check("chat stream helper", async () => {
    const stream = client.chat.completions.stream(SHORT);
    let heard = "";
    stream.on("content", (delta) => (heard += delta));
    const final = await stream.finalChatCompletion();
    assert.equal(heard, text(final));
    assert.equal(heard, text(await ask()));
});

check("chat several choices with logprobs", async () => {
    const answer = await ask({ n: 2, logprobs: true, top_logprobs: 2 });
    assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
    assert.equal(answer.choices[0].logprobs.content[0].top_logprobs.length, 2);
});

check("chat stop", async () => {
    const whole = text(await ask({ max_tokens: 64 }));
    const stop = whole.match(/[a-z]{3}/)[0];
    assert.equal(text(await ask({ max_tokens: 64, stop })), whole.slice(0, whole.indexOf(stop)));
});

check("chat reasoning_effort", async () => {
    assert.ok(text(await ask({ reasoning_effort: "low" })) !== undefined);
});

check("json_object", async () => {
    const answer = await ask({ response_format: { type: "json_object" }, logit_bias: CLOSE });
    assert.deepEqual(JSON.parse(text(answer)), {});
});

check("parse", async () => {
    const asked = { ...STRUCTURED, response_format: zodResponseFormat(Day, "day") };
    Day.parse((await client.chat.completions.parse(asked)).choices[0].message.parsed);
});

check("parse of a stream", async () => {
    const stream = client.chat.completions.stream({ ...STRUCTURED, response_format: zodResponseFormat(Day, "day") });
    Day.parse((await stream.finalChatCompletion()).choices[0].message.parsed);
});

check("parse of a cut answer", async () => {
    const cut = { ...STRUCTURED, max_tokens: 2, response_format: zodResponseFormat(Day, "day") };
    assert.ok((await refused(() => client.chat.completions.parse(cut))) instanceof LengthFinishReasonError);
});

check("tools required", async () => {
    const answer = await client.chat.completions.parse({ ...STRUCTURED, tools: TOOLS, ...REQUIRED });
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
    for (const call of answer.choices[0].message.tool_calls) Weather.parse(call.function.parsed_arguments);
});

check("tools in stream", async () => {
    const stream = client.chat.completions.stream({ ...STRUCTURED, tools: TOOLS, ...REQUIRED });
    const done = [];
    stream.on("tool_calls.function.arguments.done", (call) => done.push(call.arguments));
    const { tool_calls: calls } = (await stream.finalChatCompletion()).choices[0].message;
    assert.deepEqual(done, calls.map((call) => call.function.arguments));
    for (const call of calls) Weather.parse(JSON.parse(call.function.arguments));
});

check("tools run by the package", async () => {
    let given;
    const tool = zodFunction({ name: "Weather", parameters: Weather, function: (value) => (given = value) && "sunny" });
    const named = { type: "function", function: { name: "Weather" } };
    // A runner with a named tool ends after its call.
    const runner = client.chat.completions.runTools({ ...STRUCTURED, tools: [tool], tool_choice: named });
    await runner.done();
    Weather.parse(given);
    assert.deepEqual(runner.messages.map((message) => message.role), ["user", "assistant", "tool"]);
});

check("completions", async () => {
    const prompt = { model: MODEL, prompt: ["Paid", "Due"], max_tokens: 8, seed: 1 };
    const answer = await client.completions.create(prompt);
    const chunks = await all(await client.completions.create({ ...prompt, stream: true }));
    for (const { index, text } of answer.choices) {
        const pieces = chunks.flatMap((chunk) => chunk.choices).filter((choice) => choice.index === index);
        assert.equal(pieces.map((piece) => piece.text).join(""), text);
    }
});

check("responses", async () => {
    const response = await client.responses.create(RESPONSE);
    assert.match(response.id, /^resp_/);
    assert.ok(response.output_text.length > 0);
    const again = await client.responses.retrieve(response.id);
    assert.equal(again.output_text, response.output_text);
    const next = await client.responses.create({ ...RESPONSE, previous_response_id: response.id });
    assert.ok(next.usage.input_tokens > response.usage.input_tokens);
    await client.responses.delete(response.id);
    assert.equal((await refused(() => client.responses.retrieve(response.id))).status, 404);
});

check("responses stream", async () => {
    const events = await all(await client.responses.create({ ...RESPONSE, stream: true }));
    const deltas = events.filter((event) => event.type === "response.output_text.delta");
    const whole = await client.responses.create(RESPONSE);
    assert.equal(deltas.map((event) => event.delta).join(""), whole.output_text);
});

check("responses parse", async () => {
    const asked = { ...RESPONSE, max_output_tokens: STRUCTURED_TOKENS, text: { format: zodTextFormat(Day, "day") } };
    Day.parse((await client.responses.parse(asked)).output_parsed);
    const stream = client.responses.stream(asked);
    Day.parse((await stream.finalResponse()).output_parsed);
});

check("responses tools", async () => {
    const asked = { ...RESPONSE, max_output_tokens: STRUCTURED_TOKENS, tools: FUNCTIONS, ...REQUIRED };
    const response = await client.responses.create(asked);
    for (const item of response.output) Weather.parse(JSON.parse(item.arguments));
});

check("files and batches", async () => {
    const line = { custom_id: "q0", method: "POST", url: "/v1/chat/completions", body: { ...SHORT, max_tokens: 4 } };
    const data = await toFile(Buffer.from(JSON.stringify(line)), "in.jsonl");
    const file = await client.files.create({ file: data, purpose: "batch" });
    const terms = { endpoint: "/v1/chat/completions", completion_window: "24h" };
    let batch = await client.batches.create({ input_file_id: file.id, ...terms });
    const until = Date.now() + 60_000;
    while (!["completed", "failed"].includes(batch.status)) {
        assert.ok(Date.now() < until, batch.status);
        await new Promise((resolve) => setTimeout(resolve, 100));
        batch = await client.batches.retrieve(batch.id);
    }
    const answer = JSON.parse(await (await client.files.content(batch.output_file_id)).text());
    assert.equal(text(answer.response.body), text(await ask({ max_tokens: 4 })));
    const listed = (await client.batches.list({ limit: 1 })).data.map(({ id }) => id);
    assert.deepEqual(listed, [batch.id]);
    assert.ok((await client.files.delete(file.id)).deleted);
});

check("models", async () => {
    const listed = await all(client.models.list());
    assert.ok(listed.some((model) => model.id === MODEL));
    assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
});

check("request id", async () => {
    const { data, request_id: id } = await ask().withResponse();
    assert.ok(id, "no request id");
    assert.equal(data._request_id, id);
});

check("abort of a stream", async () => {
    const stream = await ask({ stream: true, max_tokens: 256 });
    for await (const chunk of stream) {
        assert.equal(chunk.object, "chat.completion.chunk");
        stream.controller.abort();
    }
});

check("errors", async () => {
    const stranger = new OpenAI({ baseURL: BASE_URL, apiKey: "tm-0", maxRetries: 0 });
    assert.ok((await refused(() => stranger.models.list())) instanceof OpenAI.AuthenticationError);
    assert.ok((await refused(() => ask({ model: "none" }))) instanceof OpenAI.NotFoundError);
    const error = await refused(() => ask({ temperature: 9 }));
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
});

check("embeddings", async () => {
    const input = [QUESTION, "Paid"];
    const answer = await client.embeddings.create({ model: EMBEDDING_MODEL, input });
    assert.deepEqual(answer.data.map((one) => one.index), [0, 1]);
    answer.data.forEach((one) => unit(one.embedding));
    const floats = await client.embeddings.create({ model: EMBEDDING_MODEL, input, encoding_format: "float" });
    floats.data.forEach((one, index) => {
        one.embedding.forEach((x, at) => assert.ok(Math.abs(x - answer.data[index].embedding[at]) < 1e-7));
    });
});

check("embeddings of another model are refused", async () => {
    const error = await refused(() => client.embeddings.create({ model: MODEL, input: "x" }));
    assert.deepEqual([error.status, error.param], [400, "model"]);
});

await run();
