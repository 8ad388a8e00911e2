// The connection: server-sent events read with fetch, because EventSource cannot send the token as a header.
// Ends a silent connection itself, and tries again with growing pauses until told the token is wrong.

const SILENCE_MS = 15_000; // the node sends something every 5 s
const FIRST_PAUSE_MS = 1_000;
const LONGEST_PAUSE_MS = 15_000;
const MAX_FRAME_CHARS = 64 * 1024 * 1024;

export class Feed {
  // handlers: onState(state), onProblem(text), onLost(text, retryAtMs), onTokenNeeded()
  constructor(url, getToken, handlers) {
    this.url = url;
    this.getToken = getToken;
    this.handlers = handlers;
    this.pause = FIRST_PAUSE_MS;
    this.timer = null;
    this.connecting = false;
  }

  async connect() {
    if (this.connecting) return;
    this.connecting = true;
    clearTimeout(this.timer);
    let cause;
    try {
      cause = await this.#follow();
    } finally {
      this.connecting = false;
    }
    if (cause === null) return this.handlers.onTokenNeeded();
    const wait = this.pause * (0.8 + 0.4 * Math.random());
    this.pause = Math.min(2 * this.pause, LONGEST_PAUSE_MS);
    this.timer = setTimeout(() => this.connect(), wait);
    this.handlers.onLost(cause, Date.now() + wait);
  }

  // Follows until the connection ends; why it ended, or null when the token is missing or wrong.
  async #follow() {
    const abort = new AbortController();
    let watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
    try {
      const token = this.getToken();
      const headers = token ? { Authorization: `Bearer ${token}` } : {};
      const response = await fetch(this.url, { headers, signal: abort.signal, cache: "no-store" });
      if (response.status === 401) return null;
      if (!response.ok) return await refusal(response);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let buffer = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return "the node ended the connection";
        clearTimeout(watchdog);
        watchdog = setTimeout(() => abort.abort(), SILENCE_MS);
        const frames = (buffer + value).split("\n\n");
        buffer = frames.pop();
        if (buffer.length > MAX_FRAME_CHARS) return "the node sent more than this page can take";
        this.#deliver(frames);
      }
    } catch {
      return abort.signal.aborted ? "the node has been silent" : "the node does not answer";
    } finally {
      clearTimeout(watchdog);
      abort.abort();
    }
  }

  // Of several frames that came together only the newest is shown. In a task of its own, so that an error in showing
  // it is reported as what it is and not taken for a lost connection.
  #deliver(frames) {
    const events = frames.map(parseFrame).filter((event) => event !== null);
    if (!events.length) return;
    const { name, data } = events[events.length - 1];
    this.pause = FIRST_PAUSE_MS;
    queueMicrotask(() => {
      if (name === "state") this.handlers.onState(JSON.parse(data));
      else if (name === "problem") this.handlers.onProblem(JSON.parse(data).error);
    });
  }
}

function parseFrame(frame) {
  let name = "message";
  const data = [];
  for (const line of frame.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  return data.length ? { name, data: data.join("\n") } : null;
}

async function refusal(response) {
  try {
    return (await response.json()).error;
  } catch {
    return `the node answered with ${response.status}`;
  }
}
