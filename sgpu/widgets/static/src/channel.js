// How a view talks to its kernel. A widget's own messages wait until the running cell is done, and the cell that shows
// a run blocks until the run has ended. Where the kernel has subshells (JupyterLab 4.4, ipykernel 7) a second channel,
// opened from here, is heard meanwhile; elsewhere a blocking cell can at least be interrupted.
const TARGET = "sgpu.view";
const OPEN_MILLISECONDS = 5000;

export class Channel {
  constructor(model) {
    this.model = model;
    this.kernel = model.widget_manager?.kernel;
    this.side = null;
    this.waiting = [];
    this.open().finally(() => {
      const waiting = this.waiting;
      this.waiting = null;
      waiting.forEach((message) => this.send(message));
    });
  }

  async open() {
    if (!this.kernel?.supportsSubshells || !this.kernel.createComm || this.kernel.commsOverSubshells === "disabled") return;
    try {
      const comm = this.kernel.createComm(TARGET);
      const late = new Promise((_, refuse) => setTimeout(() => refuse(new Error("no subshell")), OPEN_MILLISECONDS));
      await Promise.race([comm.subshellStarted, late]);
      comm.open({ key: this.model.get("key") });
      this.side = comm;
    } catch (error) {
      console.info(`sgpu: no second channel to the kernel (${error.message}); messages wait for the running cell`);
    }
  }

  send(message) {
    if (this.waiting) this.waiting.push(message);
    else if (this.side && !this.side.isDisposed) this.side.send(message);
    else this.model.send(message);
  }

  // Whether the kernel could be interrupted.
  async interrupt() {
    if (!this.kernel?.interrupt) return false;
    try {
      await this.kernel.interrupt();
      return true;
    } catch {
      return false;
    }
  }

  close() {
    if (this.side && !this.side.isDisposed) this.side.close();
  }
}
