// Stream: a request to the server and its events; text that arrives is never code, only data.

class Failure extends Error {
  constructor(message, status) { super(message); this.status = status; }
}

async function getJson(path, key) {
  const answer = await fetch(path, { headers: authorization(key) });
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Failure(body.error ? body.error.message : `the server answers ${answer.status}`, answer.status);
  return body;
}

function authorization(key) { return key ? { Authorization: `Bearer ${key}` } : {}; }

// The events of a streamed request, parsed; throws Failure if the server refuses it or breaks off with an error.
async function* ask(path, body, key, signal) {
  const headers = { "Content-Type": "application/json", ...authorization(key) };
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!answer.ok) {
    const found = await answer.json().catch(() => ({}));
    throw new Failure(found.error ? found.error.message : `the server answers ${answer.status}`, answer.status);
  }
  const reader = answer.body.getReader(), decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Failure("the server broke off the answer", 0);
    rest += decoder.decode(value, { stream: true });
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new Failure(found.error.message, 0);
      yield found.choices[0];
    }
  }
}
