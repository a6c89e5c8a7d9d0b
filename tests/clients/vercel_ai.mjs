// Vercel's AI SDK: the package `ai` with `@ai-sdk/openai-compatible` and `@ai-sdk/openai`. See `checks.mjs` for how to
// run it.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embed, embedMany, generateObject, generateText, jsonSchema, stepCountIs, streamObject, streamText, tool } from "ai";

import {
    BASE_URL, CLOSE, Day, EMBEDDING_MODEL, KEY, MODEL, QUESTION, STRUCTURED_TOKENS, Weather, all, assert, check, refused, run,
    unit,
} from "./checks.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const server = { baseURL: BASE_URL, apiKey: KEY };
// One call of a tool, which surely ends. Of several calls a model with random weights may make as many as there are
// tokens. One of the packages has no such option.
const options = { providerOptions: { openai: { parallelToolCalls: false } } };
const single = (body) => (body.tools ? { ...body, parallel_tool_calls: false } : body);
const named = { ...server, name: "tritmill", transformRequestBody: single };
const compatible = createOpenAICompatible({ ...named, includeUsage: true, supportsStructuredOutputs: true });
const closing = createOpenAICompatible({ ...named, transformRequestBody: (body) => ({ ...body, logit_bias: CLOSE }) });
const openai = createOpenAI(server);
// Models of chat completions by two packages, and of responses.
const models = { compatible: compatible(MODEL), chat: openai.chat(MODEL), responses: openai.responses(MODEL) };
const SHORT = { prompt: QUESTION, maxOutputTokens: 16, temperature: 0, maxRetries: 0 };
const STRUCTURED = { ...SHORT, ...options, maxOutputTokens: STRUCTURED_TOKENS };
const weather = tool({
    description: "Tells the weather of a city.",
    inputSchema: Weather,
    execute: async ({ city, days }) => `sunny in ${city} for ${days} days`,
});
const TOOLS = { tools: { weather }, toolChoice: "required" };

for (const [name, model] of Object.entries(models)) {
    check(`${name} generateText`, async () => {
        const result = await generateText({ ...SHORT, model, system: "Be short." });
        assert.ok(result.text.length > 0);
        assert.ok(["stop", "length"].includes(result.finishReason), result.finishReason);
        assert.ok(result.usage.inputTokens > 0 && result.usage.outputTokens <= 16);
    });

    check(`${name} streamText`, async () => {
        const result = streamText({ ...SHORT, model });
        const text = (await all(result.textStream)).join("");
        assert.equal(text, (await generateText({ ...SHORT, model })).text);
        assert.ok((await result.usage).outputTokens > 0);
        assert.ok(["stop", "length"].includes(await result.finishReason));
    });

    check(`${name} generateObject`, async () => {
        Day.parse((await generateObject({ ...STRUCTURED, model, schema: Day })).object);
    });

    check(`${name} streamObject`, async () => {
        const result = streamObject({ ...STRUCTURED, model, schema: Day });
        await all(result.partialObjectStream);
        Day.parse(await result.object);
    });

    check(`${name} Output.object`, async () => {
        const result = await generateText({ ...STRUCTURED, model, output: Output.object({ schema: Day }) });
        Day.parse(result.output);
    });

    check(`${name} tool`, async () => {
        const result = await generateText({ ...STRUCTURED, model, ...TOOLS });
        assert.equal(result.finishReason, "tool-calls");
        for (const call of result.toolCalls) Weather.parse(call.input);
        assert.match(result.toolResults[0].output, /^sunny in /);
    });

    check(`${name} tool in stream`, async () => {
        const result = streamText({ ...STRUCTURED, model, ...TOOLS });
        const kinds = (await all(result.fullStream)).map((part) => part.type);
        for (const kind of ["tool-input-start", "tool-input-delta", "tool-call", "tool-result"]) {
            assert.ok(kinds.includes(kind), `no ${kind} in ${[...new Set(kinds)]}`);
        }
        for (const call of await result.toolCalls) Weather.parse(call.input);
    });

    check(`${name} tool loop`, async () => {
        const result = await generateText({ ...STRUCTURED, model, ...TOOLS, stopWhen: stepCountIs(2) });
        assert.equal(result.steps.length, 2);
        assert.ok(result.steps[1].usage.inputTokens > result.steps[0].usage.inputTokens);
    });

    check(`${name} tool choice auto and none`, async () => {
        for (const toolChoice of ["auto", "none"]) {
            const result = await generateText({ ...SHORT, model, tools: { weather }, toolChoice });
            assert.ok(["stop", "length", "tool-calls"].includes(result.finishReason), result.finishReason);
        }
    });

    check(`${name} second turn`, async () => {
        const first = await generateText({ ...SHORT, model });
        const asked = { role: "user", content: QUESTION };
        const messages = [asked, ...first.response.messages, { role: "user", content: "And the year?" }];
        const second = await generateText({ ...SHORT, model, prompt: undefined, messages });
        // With responses, the package refers to the stored answer by its id; written out, the prompt is the same.
        messages.splice(1, messages.length - 2, { role: "assistant", content: first.text });
        const byHand = await generateText({ ...SHORT, model, prompt: undefined, messages });
        assert.equal(second.usage.inputTokens, byHand.usage.inputTokens);
        assert.ok(second.usage.inputTokens > first.usage.inputTokens);
    });

    check(`${name} errors`, async () => {
        const error = await refused(() => generateText({ ...SHORT, model, temperature: 9 }));
        assert.equal(error.statusCode, 400);
        assert.match(error.message, /temperature/);
    });
}

check("compatible without schemas", async () => {
    // Without `supportsStructuredOutputs` the schema is not sent, and the server promises an object.
    const schema = jsonSchema({ type: "object" });
    const result = await generateObject({ ...SHORT, model: closing(MODEL), schema });
    assert.deepEqual(result.object, {});
});

check("compatible completionModel", async () => {
    const model = compatible.completionModel(MODEL);
    const { text } = await generateText({ ...SHORT, model });
    assert.equal((await all(streamText({ ...SHORT, model }).textStream)).join(""), text);
});

check("compatible reasoning effort", async () => {
    const providerOptions = { tritmill: { reasoningEffort: "low", user: "u1" } };
    const result = await generateText({ ...SHORT, model: models.compatible, providerOptions });
    assert.ok(["stop", "length"].includes(result.finishReason));
});

for (const [name, model] of Object.entries({
    compatible: compatible.textEmbeddingModel(EMBEDDING_MODEL),
    openai: openai.textEmbeddingModel(EMBEDDING_MODEL),
})) {
    check(`embed, ${name}`, async () => {
        const { embedding, usage } = await embed({ model, value: QUESTION, maxRetries: 0 });
        unit(embedding);
        assert.ok(usage.tokens > 2);
    });

    check(`embedMany, ${name}`, async () => {
        const { embeddings } = await embedMany({ model, values: [QUESTION, "Paid"], maxRetries: 0 });
        assert.equal(embeddings.length, 2);
        embeddings.forEach(unit);
    });
}

await run();
