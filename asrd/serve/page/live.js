// The live page: questions, answers as they are decoded, the settings, and what is kept for a reload of this tab.

const KEPT = "asrd-live", BY_FACTOR = ["factor", "loo"], BY_THRESHOLD = ["asrd", "threshold", "wino", "native", "random-revocation"];
const FIELDS = ["decoder", "threshold", "factor", "kv_cache", "max_tokens", "temperature", "pace", "history"];
const pause = (ms) => new Promise((go) => setTimeout(go, ms));

class Live {
  constructor() {
    this.find = (id) => document.getElementById(id);
    this.turns = []; // { question, answer }
    this.running = null;
    this._legend();
    this._listen();
    this.open();
  }

  // Learn what the server has, then show what this tab had before.
  async open() {
    const kept = JSON.parse(sessionStorage.getItem(KEPT) || "{}");
    this.find("key").value = kept.key || "";
    try {
      const { data } = await getJson("/v1/models", this.find("key").value);
      this.model = data[0];
    } catch (error) {
      this.model = null;
      this.find("model").textContent = error.message;
      if (error.status === 401) this._askKey();
      return;
    }
    this.find("model").textContent = this.model.id;
    this._defaults(this.model.asrd, kept.settings || {});
    for (const { question, answer } of kept.turns || []) this._remember(question, answer, this._turn(question, null).plain);
    if (kept.theme) document.documentElement.dataset.theme = kept.theme;
    this._chosen();
    this.find("question").focus();
  }

  _askKey() {
    this.find("key-label").hidden = false;
    this.find("more").open = true;
    this.find("key").focus();
  }

  _defaults(facts, kept) {
    const { settings } = facts, select = this.find("decoder");
    select.replaceChildren(...facts.decoders.map((name) => make("option", { text: name })));
    const usual = {
      decoder: settings.decoder, threshold: settings.threshold, factor: settings.factor === null ? 2 : settings.factor, kv_cache: settings.kv_cache || "",
      max_tokens: facts.max_new_tokens, temperature: 0, pace: "8", history: (facts.context_length || 4096) >= 2048,
    };
    for (const name of FIELDS) {
      const value = name in kept ? kept[name] : usual[name], field = this.find(name);
      if (field.type === "checkbox") field.checked = value;
      else field.value = value;
    }
    this.find("max_tokens").max = facts.max_tokens;
  }

  settings() {
    return Object.fromEntries(FIELDS.map((name) => [name, this.find(name).type === "checkbox" ? this.find(name).checked : this.find(name).value]));
  }

  // What the request says of the decoder; only what the decoder looks at.
  _asrd() {
    const { decoder, threshold, factor, kv_cache } = this.settings(), found = { drafts: true, decoder, kv_cache: kv_cache || null };
    if (BY_THRESHOLD.includes(decoder)) found.threshold = Number(threshold);
    if (BY_FACTOR.includes(decoder)) found.factor = Number(factor);
    return found;
  }

  _body(question) {
    const { max_tokens, temperature, history } = this.settings();
    const body = { model: this.model.id, stream: true, max_tokens: Number(max_tokens), temperature: Number(temperature), asrd: this._asrd() };
    if (!this.model.asrd.chat) return { ...body, prompt: question };
    const earlier = history ? this.turns.filter((turn) => turn.answer) : [];
    const messages = earlier.flatMap((turn) => [{ role: "user", content: turn.question }, { role: "assistant", content: turn.answer }]);
    return { ...body, messages: [...messages, { role: "user", content: question }] };
  }

  async send(question) {
    if (!this.model) { await this.open(); if (!this.model) return; }
    const path = this.model.asrd.chat ? "/v1/chat/completions" : "/v1/completions";
    const body = this._body(question), shown = this._turn(question, body.asrd);
    const stop = new AbortController();
    this.running = stop;
    this._busy(true);
    let text = "";
    try {
      for await (const news of ask(path, body, this.find("key").value, stop.signal)) {
        text += news.delta ? news.delta.content || "" : news.text || "";
        if (news.asrd) await this._show(shown, news, stop.signal);
        shown.plain.textContent = text;
      }
    } catch (error) {
      this._fail(shown, error);
    }
    if (stop.signal.aborted && shown.badge.hidden) this._end(shown, "stopped", false);
    this.running = null;
    this._busy(false);
    this._remember(question, text, shown.plain);
  }

  // News of a step, of the beginning or of the end.
  async _show(shown, news, signal) {
    const { asrd } = news;
    if (asrd.length) {
      shown.canvas = new Canvas(asrd.length);
      shown.text.replaceChildren(shown.canvas.element);
      shown.turn.scrollIntoView({ block: "start" });
    } else if (asrd.step) {
      const pace = Number(this.find("pace").value);
      shown.canvas.apply(asrd);
      this._count(shown);
      if (pace && !signal.aborted) await pause(1000 / pace);
    } else {
      shown.canvas.step = asrd.forward_passes; // a step may take another number of them
      this._end(shown, news.finish_reason, true);
    }
    if (document.documentElement.scrollHeight - scrollY - innerHeight < 260) scrollTo(0, document.documentElement.scrollHeight);
  }

  _count({ canvas, counters }) {
    counters.passes.textContent = canvas.step;
    counters.rate.textContent = number(canvas.tokens / Math.max(canvas.step, 1));
    counters.saved.textContent = Math.max(canvas.tokens - canvas.step, 0);
    for (const name of ["pending", "anchors", "revoked", "edited"]) counters[name].textContent = canvas.counts[name];
  }

  _end(shown, reason, whole) {
    if (shown.canvas) { shown.canvas.finish(whole); this._count(shown); }
    shown.counters.pending.textContent = 0;
    shown.badge.hidden = false;
    shown.badge.textContent = { stop: "complete", length: "cut at max tokens" }[reason] || reason;
    shown.badge.dataset.good = String(reason === "stop");
    this.find("status").textContent = `answer ${shown.badge.textContent} after ${shown.counters.passes.textContent} forward passes`;
  }

  _fail(shown, error) {
    if (error.name === "AbortError") return;
    shown.fault.textContent = error.message;
    this.find("status").textContent = error.message;
    if (error.status === 401) this._askKey();
  }

  // The elements of a question and its answer; settings is null for an answer from before a reload.
  _turn(question, settings) {
    this.find("hint").hidden = true;
    const names = { passes: "forward passes", rate: "tokens / pass", saved: "passes saved", pending: "pending", anchors: "anchors", revoked: "revoked", edited: "edited" };
    const shown = { counters: {}, canvas: null, badge: make("span", { class: "badge", hidden: "" }), text: make("div", { class: "text-box" }), plain: make("p", { class: "plain" }), fault: make("p", { class: "fault" }) };
    const list = make("dl", { class: "counters" });
    for (const [key, label] of Object.entries(names)) {
      shown.counters[key] = make("dd", { text: "0" });
      list.append(make("div", { class: `counter-${key}` }, make("dt", { text: label }), shown.counters[key]));
    }
    list.querySelector(".counter-saved").title = "against one forward pass for each token of the answer";
    const said = settings && Object.entries(settings).filter(([name, value]) => !["decoder", "drafts"].includes(name) && value !== null).map(([name, value]) => `${name} ${value}`).join(", ");
    const title = make("div", { class: "panel-title" }, make("h2", { text: settings ? settings.decoder : "earlier" }), make("span", { class: "settings", text: said || "" }), shown.badge);
    const parts = settings ? [title, list, shown.text, shown.plain, shown.fault] : [title, shown.plain];
    const turn = make("section", { class: "turn" }, make("p", { class: "question", text: question }), make("article", { class: "panel", "aria-label": "answer" }, ...parts));
    this.find("turns").append(turn);
    turn.scrollIntoView({ block: "start" });
    return Object.assign(shown, { turn });
  }

  _remember(question, answer, plain) {
    plain.textContent = answer;
    this.turns.push({ question, answer });
    this._keep();
  }

  _keep() {
    const { theme } = document.documentElement.dataset;
    sessionStorage.setItem(KEPT, JSON.stringify({ turns: this.turns.slice(-20), settings: this.model ? this.settings() : undefined, key: this.find("key").value, theme }));
  }

  _busy(on) {
    this.find("send").hidden = on;
    this.find("stop").hidden = !on;
  }

  _chosen() {
    const { decoder, max_tokens, temperature } = this.settings(), found = this._asrd();
    const own = found.threshold !== undefined ? `, threshold ${found.threshold}` : found.factor !== undefined ? `, factor ${found.factor}` : "";
    this.find("chosen").textContent = `${decoder}${own}, ${max_tokens} tokens, temperature ${temperature}`;
    this.find("threshold-label").hidden = !BY_THRESHOLD.includes(decoder);
    this.find("factor-label").hidden = !BY_FACTOR.includes(decoder);
  }

  _legend() {
    this.find("legend").append(...ROLES.map((role) => make("li", {},
      make("span", { class: "tok", data: { role: role.name, ghost: "" }, text: role.label }), make("small", { text: role.meaning }))));
  }

  _listen() {
    const composer = this.find("ask"), room = () => { document.body.style.paddingBottom = `${composer.offsetHeight + 24}px`; };
    new ResizeObserver(room).observe(composer); // it covers the end of the page, by more while the settings are open
    this.find("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      const field = this.find("question"), question = field.value.trim();
      if (!question || this.running) return;
      field.value = "";
      this.send(question);
    });
    this.find("question").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.find("ask").requestSubmit(); }
    });
    this.find("stop").addEventListener("click", () => this.running && this.running.abort());
    this.find("fresh").addEventListener("click", () => {
      if (this.running) this.running.abort();
      this.turns = [];
      this.find("turns").replaceChildren();
      this.find("hint").hidden = false;
      this._keep();
    });
    for (const name of FIELDS) this.find(name).addEventListener("change", () => { this._chosen(); this._keep(); });
    this.find("key").addEventListener("change", () => { this._keep(); if (!this.model) this.open(); });
    this.find("theme").addEventListener("click", () => {
      const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
      this._keep();
    });
  }
}

const live = new Live();
