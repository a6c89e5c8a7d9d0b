// What the scripts of the Node clients share: the server they ask, the schemas they ask for, and the runner.
//
//     node SCRIPT.mjs BASE_URL KEY MODEL EMBEDDING_MODEL [PART_OF_A_NAME]
//
// prints `ok NAME` or `FAIL NAME: REASON` for each check, and exits with 1 if one failed. Instead of arguments the
// variables OPENAI_BASE_URL, OPENAI_API_KEY, MODEL and EMBEDDING_MODEL are read. As in `checks.py`, checks are of what a server promises
// for any text, and all numbers and texts in schemas are bounded.

import assert from "node:assert/strict";

import { z } from "zod";

const [base, secret, name, embedding, only = ""] = process.argv.slice(2);
export const BASE_URL = base ?? process.env.OPENAI_BASE_URL;
export const KEY = secret ?? process.env.OPENAI_API_KEY;
export const MODEL = name ?? process.env.MODEL;
export const EMBEDDING_MODEL = embedding ?? process.env.EMBEDDING_MODEL;
export const QUESTION = "Paid on the 3rd of March, 2024";
export const MESSAGES = [{ role: "user", content: QUESTION }];
// Tokens that a date or a call of a tool surely fits into, white space included.
export const STRUCTURED_TOKENS = 300;
// Makes the golden model write `}`, so that a JSON object without a schema ends: {}.
export const CLOSE = { 92: 100 };

export const Day = z.object({ day: z.number().int().min(1).max(31), month: z.enum(["March", "May"]) });
export const Weather = z.object({ city: z.enum(["Paris", "Rome"]), days: z.number().int().min(1).max(9) });

const checks = [];

/** Adds a check: a name, and a function that throws if something is wrong. */
export function check(name, run) {
    checks.push({ name, run });
}

/** Returns the error of a call; throws if it succeeds. */
export async function refused(call) {
    let answer;
    try {
        answer = await call();
    } catch (error) {
        return error;
    }
    throw new Error(`no error, but ${JSON.stringify(answer)?.slice(0, 200)}`);
}

/** Fails unless a vector has length 1. */
export function unit(vector) {
    const length = Math.hypot(...vector);
    assert.ok(Math.abs(length - 1) < 1e-4, `length ${length} of ${vector.length}`);
}

/** Returns the items of an asynchronous sequence. */
export async function all(items) {
    const found = [];
    for await (const item of items) found.push(item);
    return found;
}

/** Runs the checks and ends the process. */
export async function run() {
    let failed = 0;
    for (const { name, run } of checks.filter(({ name }) => name.includes(only))) {
        try {
            await run();
            console.log(`ok ${name}`);
        } catch (error) {
            failed += 1;
            const body = error.responseBody ?? error.cause?.responseBody ?? "";
            const text = `${error.name}: ${error.message} ${body}`.replace(/\s+/g, " ").trim();
            console.log(`FAIL ${name}: ${text.slice(0, 400)}`);
        }
    }
    process.exit(failed > 0 ? 1 : 0);
}

export { assert, z };
