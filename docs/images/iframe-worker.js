/* Search where pages are opened from a folder: a browser starts no worker there, so its script runs in a frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inside = frame.contentWindow
      this.waiting = []
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = this.inside.document.createElement("script")
      script.src = new URL(url, location.href).href
      script.onload = () => {
        for (const data of this.waiting) this.deliver(data)
        this.waiting = null
      }
      this.inside.document.body.appendChild(script)
    }
    deliver(data) {
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }))
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.deliver(data)
    }
    terminate() {}
  }
}
