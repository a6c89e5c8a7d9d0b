#!/usr/bin/env bash
# The API by hand: curl, with jq to read the answers.
#
#     bash curl.sh BASE_URL KEY MODEL EMBEDDING_MODEL [PART_OF_A_NAME]
#
# prints `ok NAME` or `FAIL NAME: REASON` for each check, and exits with 1 if one failed. Instead of arguments the
# variables OPENAI_BASE_URL, OPENAI_API_KEY, MODEL and EMBEDDING_MODEL are read.

set -u
url=${1:-$OPENAI_BASE_URL} key=${2:-$OPENAI_API_KEY} model=${3:-$MODEL} embedding=${4:-$EMBEDDING_MODEL} only=${5:-}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0
question='[{"role": "user", "content": "Paid on the 3rd of March, 2024"}]'
chat="{\"model\": \"$model\", \"max_tokens\": 8, \"seed\": 1, \"messages\": $question}"
text="{\"model\": \"$model\", \"max_tokens\": 8, \"seed\": 1, \"prompt\": \"Paid\"}"
response="{\"model\": \"$model\", \"max_output_tokens\": 16, \"temperature\": 0, \"input\": \"Paid\"}"
day='{"type": "object", "properties": {"day": {"type": "integer", "minimum": 1, "maximum": 31}},
      "required": ["day"], "additionalProperties": false}'
tools="[{\"type\": \"function\", \"function\": {\"name\": \"pay\", \"parameters\": $day}}]"

# Prints the first object with the fields of the second.
with() { jq -n --argjson one "$1" --argjson two "$2" '$one + $two'; }

# Sends a request with the arguments of curl; leaves the body, the headers and the status.
send() {
    status=$(curl -sS --noproxy '*' --max-time 60 -o "$folder/body" -D "$folder/headers" -w '%{http_code}' \
        -H "Authorization: Bearer $key" "$@")
}

# Posts an object to a path.
post() { send "$url/$1" -H 'Content-Type: application/json' --data-binary @- <<< "$2"; }

# check NAME STATUS FILTER: the last answer has the status, and the filter of jq says true for its body.
check() {
    [[ $1 == *"$only"* ]] || return 0
    if [[ $status != "$2" ]]; then
        reason="status $status, not $2: $(head -c 300 "$folder/body")"
    elif ! jq -e "$3" "$folder/body" >/dev/null 2>&1; then
        reason="not $3: $(head -c 300 "$folder/body")"
    else
        echo "ok $1"
        return
    fi
    echo "FAIL $1: ${reason//$'\n'/ }"
    failed=1
}

# Turns the last answer, a stream of events, into a list of its objects, without the end.
events() {
    last=$(grep '^data: ' "$folder/body" | tail -n 1)
    sed -n 's/^data: //p' "$folder/body" | grep -v '^\[DONE\]$' | jq -s . > "$folder/events"
    mv "$folder/events" "$folder/body"
}

# Puts what the headers say into the body: {"name": "value", …}.
headers() {
    tr -d '\r' < "$folder/headers" | jq -Rn '[inputs | capture("^(?<key>[^:]+): (?<value>.*)$")
        | .key |= ascii_downcase] | from_entries' > "$folder/body"
}

post chat/completions "$chat"
check chat 200 '.object == "chat.completion" and .usage.total_tokens == .usage.prompt_tokens + .usage.completion_tokens'
whole=$(jq -c '.choices[0].message.content' "$folder/body")
headers
check 'content type' 200 '.["content-type"] | startswith("application/json")'
check 'request id' 200 '.["x-request-id"] | length > 0'

post chat/completions "$(with "$chat" '{"stream": true, "stream_options": {"include_usage": true}}')"
events
check 'chat stream' 200 "([.[].choices[0].delta.content // \"\"] | add) == $whole and .[-1].usage.total_tokens > 0"
[[ $last == 'data: [DONE]' ]] || status="end '$last'"
check 'chat stream ends with [DONE]' 200 true

post chat/completions "$(with "$chat" '{"n": 2, "logprobs": true, "top_logprobs": 2}')"
check 'chat choices and logprobs' 200 '(.choices | length) == 2
    and (.choices[1].logprobs.content[0].top_logprobs | length) == 2'

post chat/completions "$(with "$chat" "{\"max_tokens\": 200, \"response_format\":
    {\"type\": \"json_schema\", \"json_schema\": {\"name\": \"day\", \"schema\": $day}}}")"
check 'chat json_schema' 200 '.choices[0].message.content | fromjson | .day >= 1 and .day <= 31'

post chat/completions "$(with "$chat" "{\"max_tokens\": 200, \"tools\": $tools,
    \"tool_choice\": \"required\", \"parallel_tool_calls\": false}")"
check 'chat tools required' 200 '.choices[0] | .finish_reason == "tool_calls" and (.message.tool_calls[0]
    | .type == "function" and .function.name == "pay" and (.function.arguments | fromjson | .day >= 1))'

post chat/completions "$(with "$chat" "{\"max_tokens\": 200, \"tools\": $tools, \"stream\": true,
    \"tool_choice\": \"required\", \"parallel_tool_calls\": false}")"
events
# LlamaIndex reads one call of a chunk only.
check 'chat tools in stream' 200 '[.[].choices[0].delta.tool_calls // empty] | all(length == 1)
    and (.[0][0] | .id != null and .function.name == "pay")
    and (map(.[0].function.arguments // "") | add | fromjson | .day >= 1)'

post chat/completions "$(with "$chat" '{"messages": [
    {"role": "user", "content": "x"},
    {"role": "assistant", "tool_calls":
        [{"id": "c1", "type": "function", "function": {"name": "pay", "arguments": "{\"day\": 3}"}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "paid"}]}')"
check 'chat history without content' 200 '.usage.prompt_tokens > 0'

post completions "$text"
check completion 200 '.object == "text_completion"'
post completions "$(with "$text" '{"prompt": ["Paid", "Due"]}')"
check 'completion of two prompts' 200 '(.choices | length) == 2'
post completions "$(with "$text" '{"prompt": [[1, 2, 3], [4, 5]]}')"
check 'completion of two lists of tokens' 200 '.usage.prompt_tokens == 5'
post completions "$(with "$text" '{"stream": true}')"
events
check 'completion stream' 200 '[.[].choices[0].text] | add | length > 0'

post responses "$response"
check response 200 '.object == "response" and .output[0].content[0].type == "output_text" and .usage.output_tokens > 0'
id=$(jq -r '.id // "none"' "$folder/body")
send "$url/responses/$id"
check 'response retrieved' 200 ".id == \"$id\""
send "$url/responses/$id/input_items"
check 'response input items' 200 '.object == "list" and .data[0].role == "user"'
send -X DELETE "$url/responses/$id"
check 'response deleted' 200 '.deleted == true'
send "$url/responses/$id"
check 'response gone' 404 '.error.code != "unknown_url"'
post responses "$(with "$response" '{"stream": true}')"
events
check 'response stream' 200 '.[0].type == "response.created" and ([.[].sequence_number] == [range(length)])
    and (.[-1].type | IN("response.completed", "response.incomplete"))'

send "$url/models"
check models 200 ".object == \"list\" and any(.data[]; .id == \"$model\")"
send "$url/models/$model"
check model 200 ".id == \"$model\" and .object == \"model\""

line="{\"custom_id\": \"q0\", \"method\": \"POST\", \"url\": \"/v1/chat/completions\", \"body\": $chat}"
tr -d '\n' <<< "$line" > "$folder/in.jsonl"
send "$url/files" -F purpose=batch -F "file=@$folder/in.jsonl"
check 'file created' 200 '.object == "file" and .purpose == "batch"'
file=$(jq -r '.id // "none"' "$folder/body")
send "$url/files/$file/content"
cmp -s "$folder/body" "$folder/in.jsonl" || status="other content"
check 'file content' 200 true
post batches "{\"input_file_id\": \"$file\", \"endpoint\": \"/v1/chat/completions\", \"completion_window\": \"24h\"}"
check 'batch created' 200 '.object == "batch"'
batch=$(jq -r '.id // "none"' "$folder/body")
for _ in $(seq 300); do
    send "$url/batches/$batch"
    jq -e '.status | IN("completed", "failed")' "$folder/body" > /dev/null && break
    sleep 0.1
done
check 'batch completed' 200 '.status == "completed" and .request_counts.completed == 1'
send "$url/files/$(jq -r '.output_file_id // "none"' "$folder/body")/content"
check 'batch output' 200 ".response.body.choices[0].message.content == $whole"
send "$url/batches?limit=1"
check 'batch list' 200 ".object == \"list\" and .data[0].id == \"$batch\""
send -X DELETE "$url/files/$file"
check 'file deleted' 200 '.deleted == true'

key=tm-0 send "$url/models"
check 'error key' 401 '.error.code == "invalid_api_key"'
headers
check 'error request id' 401 '.["x-request-id"] | length > 0'
post chat/completions "$(with "$chat" '{"model": "none"}')"
check 'error model' 404 '.error.code == "model_not_found" and .error.param == "model"'
post chat/completions "$(with "$chat" '{"temperature": 9}')"
check 'error parameter' 400 '.error.param == "temperature" and .error.type == "invalid_request_error"'
post chat/completions '{"model": '
check 'error JSON' 400 '.error.type == "invalid_request_error"'
send "$url/chat/completions"
check 'error method' 405 '.error.message | length > 0'
send "$url/nothing"
check 'error path' 404 '.error.message | length > 0'
head -c 6000000 /dev/zero | tr '\0' x > "$folder/large"
send "$url/chat/completions" -H 'Content-Type: application/json' --data-binary "@$folder/large"
check 'error size' 413 '.error.message | length > 0'
post embeddings "{\"model\": \"$embedding\", \"input\": [\"x\", \"y\"]}"
check 'embeddings' 200 '(.data | length) == 2 and ([.data[0].embedding[] | . * .] | add) > 0.999'
post embeddings "{\"model\": \"$embedding\", \"input\": \"x\", \"encoding_format\": \"base64\"}"
check 'embeddings base64' 200 '.data[0].embedding | type == "string" and length > 100'
post embeddings "{\"model\": \"$model\", \"input\": \"x\"}"
check 'error embeddings' 400 '.error.param == "model"'

exit "$failed"
