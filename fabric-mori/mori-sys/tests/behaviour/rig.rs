//! Two engines of this process that know each other, by the shim's raw functions.

use mori_double::INSTALLS;
use mori_sys::{Code, Engine, Kind, Memory, Rdma, Session, Shim, ShimSearchPath, Text};
use std::ffi::{CStr, CString};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

/// What a call said: its kind, and its text unless that is [`Kind::OK`].
pub(crate) type ShimCallResult = Result<(), (i32, String)>;

pub(crate) fn shim() -> Arc<Shim> {
    static SHIM: OnceLock<Arc<Shim>> = OnceLock::new();
    let load = || {
        let places = ShimSearchPath {
            asked: Some(INSTALLS[crate::CLASS].shim.into()),
            ..ShimSearchPath::default()
        };
        Shim::load(&places).expect("the double's shim")
    };
    Arc::clone(SHIM.get_or_init(load))
}

/// A function of the double that is not MoRI's.
pub(crate) fn knob<F: Copy>(name: &str) -> F {
    let path = format!("{}/libmori_io.so", INSTALLS[crate::CLASS].lib);
    // SAFETY: The library is loaded already, and stays so.
    let library = unsafe { libloading::Library::new(path) }.expect("the double");
    let library = std::mem::ManuallyDrop::new(library);
    // SAFETY: The caller knows its type.
    *unsafe { library.get::<F>(name) }.expect("a knob")
}

/// Faults are the process's: one test at a time, and none left behind.
pub(crate) struct ShimFaultGuard(#[expect(dead_code, reason = "held")] MutexGuard<'static, ()>);

impl ShimFaultGuard {
    pub(crate) fn set(spec: &str) -> ShimFaultGuard {
        static ONE: Mutex<()> = Mutex::new(());
        let faults = ShimFaultGuard(ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        faults.again(spec);
        faults
    }

    pub(crate) fn again(&self, spec: &str) {
        shim();
        let set: unsafe extern "C" fn(*const std::ffi::c_char) -> i32 = knob("mori_double_faults");
        let spec = CString::new(spec).expect("no NUL");
        // SAFETY: A string that lives over the call.
        assert_eq!(unsafe { set(spec.as_ptr()) }, 0);
    }
}

impl Drop for ShimFaultGuard {
    fn drop(&mut self) {
        self.again("");
    }
}

/// Calls `body` with a buffer for an error.
pub(crate) fn answer(body: impl FnOnce(*mut Text) -> i32) -> ShimCallResult {
    let mut bytes = [0x55u8; 1024];
    let mut text = Text { data: bytes.as_mut_ptr().cast(), room: bytes.len() };
    let kind = body(&raw mut text);
    if kind == Kind::OK {
        return Ok(());
    }
    let said = CStr::from_bytes_until_nul(&bytes).expect("an error has a text");
    Err((kind, said.to_str().expect("UTF-8").to_owned()))
}

/// The kind of an error.
pub(crate) fn kind(answer: &ShimCallResult) -> i32 {
    answer.as_ref().map_or_else(|(kind, _)| *kind, |()| Kind::OK)
}

/// Calls `body` with a buffer for a descriptor.
pub(crate) fn bytes(body: impl FnOnce(*mut u8, usize, *mut usize, *mut Text) -> i32) -> Vec<u8> {
    let (mut out, mut len) = (vec![0; 1024], 0);
    answer(|error| body(out.as_mut_ptr(), out.len(), &raw mut len, error)).expect("a descriptor");
    out.truncate(len);
    out
}

/// An engine that frees all it has.
pub(crate) struct ShimTestNode {
    pub(crate) shim: Arc<Shim>,
    pub(crate) engine: *mut Engine,
    memories: Vec<(*mut Memory, Vec<u64>)>,
    sessions: Vec<*mut Session>,
}

// SAFETY: Of the calls that need it, tests do one at a time.
unsafe impl Sync for ShimTestNode {}

impl ShimTestNode {
    pub(crate) fn bare() -> ShimTestNode {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        // Six bytes, whichever number it is.
        let key = format!("n{:05}", COUNT.fetch_add(1, Ordering::Relaxed));
        let key = CString::new(key).expect("no NUL");
        let (shim, mut engine) = (shim(), null_mut());
        let new = shim.functions.kf_engine_new;
        // SAFETY: All pointers live over the call.
        answer(|e| unsafe { new(key.as_ptr(), c"127.0.0.1".as_ptr(), 0, &raw mut engine, e) })
            .expect("an engine");
        ShimTestNode { shim, engine, memories: Vec::new(), sessions: Vec::new() }
    }

    pub(crate) fn rdma() -> ShimTestNode {
        let node = ShimTestNode::bare();
        let (add, config) = (node.shim.functions.kf_engine_rdma, Rdma::default());
        // SAFETY: As above.
        answer(|e| unsafe { add(node.engine, &raw const config, e) }).expect("a backend");
        node
    }

    pub(crate) fn xgmi() -> ShimTestNode {
        let node = ShimTestNode::bare();
        let add = node.shim.functions.kf_engine_xgmi;
        // SAFETY: As above.
        answer(|e| unsafe { add(node.engine, 4, 4, e) }).expect("a backend");
        node
    }

    pub(crate) fn desc(&self) -> Vec<u8> {
        let desc = self.shim.functions.kf_engine_desc;
        // SAFETY: As above.
        bytes(|out, room, len, e| unsafe { desc(self.engine, out, room, len, e) })
    }

    pub(crate) fn meet(&self, peer: &[u8]) -> ShimCallResult {
        let add = self.shim.functions.kf_peer_add;
        // SAFETY: As above.
        answer(|e| unsafe { add(self.engine, peer.as_ptr(), peer.len(), e) })
    }

    /// Registers words of memory; the index of the memory.
    pub(crate) fn memory(&mut self, words: Vec<u64>, device: i32) -> usize {
        let (new, mut memory) = (self.shim.functions.kf_memory_new, null_mut());
        let (base, len) = (words.as_ptr() as u64, words.len() as u64 * 8);
        let location = if device < 0 { 1 } else { 2 };
        // SAFETY: The words live until the memory is freed.
        answer(|e| unsafe { new(self.engine, base, len, device, location, &raw mut memory, e) })
            .expect("a memory");
        self.memories.push((memory, words));
        self.memories.len() - 1
    }

    pub(crate) fn raw_memory(&self, memory: usize) -> *mut Memory {
        self.memories[memory].0
    }

    /// A word of a memory, which the other engine may have written.
    pub(crate) fn word(&self, memory: usize, at: usize) -> u64 {
        let words = &self.memories[memory].1;
        assert!(at < words.len());
        // SAFETY: It is inside; MoRI writes it behind the compiler's back.
        unsafe { words.as_ptr().add(at).read_volatile() }
    }

    pub(crate) fn memory_desc(&self, memory: usize) -> Vec<u8> {
        let desc = self.shim.functions.kf_memory_desc;
        let memory = self.raw_memory(memory);
        // SAFETY: The memory is registered.
        bytes(|out, room, len, e| unsafe { desc(memory, out, room, len, e) })
    }

    pub(crate) fn try_session(
        &mut self,
        local: usize,
        remote: &[u8],
    ) -> Result<usize, (i32, String)> {
        let (new, mut session) = (self.shim.functions.kf_session_new, null_mut());
        let local = self.raw_memory(local);
        // SAFETY: All pointers live over the call.
        answer(|e| unsafe {
            new(self.engine, local, remote.as_ptr(), remote.len(), &raw mut session, e)
        })?;
        self.sessions.push(session);
        Ok(self.sessions.len() - 1)
    }

    pub(crate) fn session(&self, session: usize) -> *mut Session {
        self.sessions[session]
    }

    pub(crate) fn take(&self) -> u64 {
        let (take, mut handle) = (self.shim.functions.kf_status_take, 0);
        // SAFETY: As above.
        answer(|e| unsafe { take(self.engine, &raw mut handle, e) }).expect("a status");
        handle
    }

    pub(crate) fn poll(&self, handle: u64) -> Result<u32, (i32, String)> {
        let (poll, mut code) = (self.shim.functions.kf_status_poll, u32::MAX);
        // SAFETY: As above.
        answer(|e| unsafe { poll(self.engine, handle, &raw mut code, e) })?;
        Ok(code)
    }

    pub(crate) fn text(&self, handle: u64) -> String {
        let mut bytes = [0x55u8; 512];
        let mut text = Text { data: bytes.as_mut_ptr().cast(), room: bytes.len() };
        let get = self.shim.functions.kf_status_text;
        // SAFETY: As above.
        assert_eq!(unsafe { get(self.engine, handle, &raw mut text) }, Kind::OK);
        CStr::from_bytes_until_nul(&bytes).expect("NUL").to_str().expect("UTF-8").to_owned()
    }

    pub(crate) fn give(&self, handle: u64) -> ShimCallResult {
        let give = self.shim.functions.kf_status_give;
        // SAFETY: As above.
        answer(|e| unsafe { give(self.engine, handle, e) })
    }

    /// Statuses that are taken and kept.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let (count, mut counts) = (self.shim.functions.kf_status_count, [0; 3]);
        // SAFETY: As above.
        answer(|e| unsafe { count(self.engine, counts.as_mut_ptr(), e) }).expect("counts");
        assert!(counts[2] < 1 << 24);
        (counts[0], counts[1])
    }

    /// Posts ranges of (local, remote, len).
    pub(crate) fn post(
        &self,
        session: usize,
        way: u32,
        ranges: &[[u64; 3]],
        status: u64,
    ) -> ShimCallResult {
        let column = |i: usize| ranges.iter().map(|range| range[i]).collect::<Vec<_>>();
        let (local, remote, len) = (column(0), column(1), column(2));
        let pointer = |from: &[u64]| if from.is_empty() { null() } else { from.as_ptr() };
        let (post, session) = (self.shim.functions.kf_post, self.session(session));
        // SAFETY: The arrays have this length.
        answer(|e| unsafe {
            let ranges = (pointer(&local), pointer(&remote), pointer(&len));
            post(session, way, local.len(), ranges.0, ranges.1, ranges.2, status, e)
        })
    }

    /// Polls until the status is final.
    pub(crate) fn finish(&self, handle: u64) -> u32 {
        let end = Instant::now() + Duration::from_secs(300);
        loop {
            match self.poll(handle).expect("a status") {
                Code::IN_PROGRESS if Instant::now() < end => std::thread::yield_now(),
                code => return code,
            }
        }
    }

    pub(crate) fn free_session(&mut self, session: usize) -> ShimCallResult {
        let (free, session) = (self.shim.functions.kf_session_free, self.sessions.remove(session));
        // SAFETY: It is not used again.
        answer(|e| unsafe { free(session, e) })
    }
}

impl Drop for ShimTestNode {
    fn drop(&mut self) {
        let functions = self.shim.functions;
        // SAFETY: Nothing is used again.
        unsafe {
            for session in &self.sessions {
                answer(|e| (functions.kf_session_free)(*session, e)).expect("a session ends");
            }
            for (memory, _) in &self.memories {
                answer(|e| (functions.kf_memory_free)(*memory, e)).expect("a memory ends");
            }
            answer(|e| (functions.kf_engine_free)(self.engine, e)).expect("an engine ends");
        }
    }
}

/// An engine with memory 0 of 1024 zeros and session 0 to a peer with 1024 words that count, on
/// that backend.
pub(crate) fn pair(make: fn() -> ShimTestNode, device: i32) -> (ShimTestNode, ShimTestNode) {
    let (mut near, mut far) = (make(), make());
    near.meet(&far.desc()).expect("a peer");
    far.meet(&near.desc()).expect("a peer");
    near.memory(vec![0; 1024], device);
    far.memory((0..1024).collect(), device);
    near.try_session(0, &far.memory_desc(0)).expect("a session");
    (near, far)
}
