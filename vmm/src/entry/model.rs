//! A model of how a system call is handed over: the stub's own code, interpreted, against a polling worker and the worker that runs the
//! vCPU, in every order of their steps. Owns nothing outside of tests.
//!
//! What the two sides on the host do is repeated here step by step: `Requests::serve`, `Requests::close` and `Guest::leave_stub` of
//! `vcpu_pool`. A change there belongs here too.
use std::collections::{HashMap, HashSet};

use guest_abi::layout::{MAILBOX_PAGE, PAGE_SIZE, REQUEST_PAGE};
use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

use super::TrapMode;
use super::stub::{self, Stub, state};

/// Calls that the program makes.
const CALLS: u64 = 2;
/// Words of the request page that are kept: the first ones, and the one below [`stub::STACK`].
const WORDS: usize = stub::RSP + 2;
/// RAX of call 0, RCX, R11 of a program that calls; results are larger than all of them.
const NUMBER: u64 = 300;
const RETURN: u64 = 0x40_0000;
const FLAGS: u64 = 0x246;
/// Its RSP.
const SP: u64 = 0x7000_0000;
const RESULT: u64 = 1 << 40;
/// The call that the stub answers by itself, and its answer.
const ANSWERED: u64 = 39;
const ANSWER: u64 = RESULT + 1;
/// Looks before a request is taken back: as many show all there is to see as the real number does.
const PATIENCE: u64 = 2;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Outcome {
    Refused,
    Done,
    Held,
}

/// The polling worker is about to…
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Server {
    Look,
    Lock,
    Exchange,
    ReadCall,
    ReadSequence { call: u64 },
    Serve { call: u64, sequence: u64 },
    StoreResult { call: u64, end: Outcome },
    StoreState { end: Outcome },
    Unlock,
}

/// The vCPU's worker.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Worker {
    InGuest,
    /// The vCPU stopped: by its own `out`, or for a kick.
    Stopped {
        by_out: bool,
    },
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct World {
    rip: u64,
    rax: u64,
    rcx: u64,
    r11: u64,
    rsp: u64,
    words: [u64; WORDS],
    /// The call that the program makes or is about to make.
    call: u64,
    served: [u8; CALLS as usize],
    server: Server,
    worker: Worker,
    locked: bool,
    open: bool,
    answer: Option<(u64, u64)>,
    kicked: bool,
    /// Kicks by others, and changes of mind about polling, that may yet come.
    kicks: u8,
    flips: u8,
}

struct Model {
    stub: Stub,
    code: HashMap<u64, Instruction>,
    /// Whether the second call is one that the stub answers.
    answers: bool,
    /// Whether calls arrive by trampolines.
    direct: bool,
}

fn result(call: u64) -> u64 {
    RESULT + 0x100 + call
}

impl Model {
    fn new(mode: TrapMode, answers: bool, direct: bool) -> Model {
        let stub = Stub::new(mode);
        let mut code = HashMap::new();
        for i in Decoder::with_ip(64, &stub.code, stub.entry, DecoderOptions::NONE) {
            let flags = if i.mnemonic() == Mnemonic::Sysretq { 0 } else { i.rflags_modified() };
            assert_eq!(flags, 0, "{i:?} at {:#x} changes flags", i.ip());
            code.insert(i.ip(), i);
        }
        Model { stub, code, answers, direct }
    }

    fn number(&self, call: u64) -> u64 {
        if self.answers && call == 1 { ANSWERED } else { NUMBER + call }
    }

    fn begin(&self, w: &mut World) {
        (w.rip, w.rax, w.rcx, w.r11) = (RETURN, self.number(w.call), 7, 8);
    }

    fn start(&self) -> World {
        let mut w = World {
            rip: 0,
            rax: 0,
            rcx: 0,
            r11: 0,
            rsp: SP,
            words: [0; WORDS],
            call: 0,
            served: [0; CALLS as usize],
            server: Server::Look,
            worker: Worker::InGuest,
            locked: false,
            open: true,
            answer: None,
            kicked: false,
            kicks: 2,
            flips: 2,
        };
        w.words[stub::POLLED] = 1;
        self.begin(&mut w);
        w
    }

    /// Where a word is kept; beyond [`WORDS`] if it is not.
    fn kept(word: usize) -> usize {
        match word {
            _ if word + 1 == stub::STACK => WORDS - 1,
            _ if word > stub::RSP => WORDS,
            _ => word,
        }
    }

    fn read(&self, w: &World, at: u64) -> u64 {
        let word = (at % PAGE_SIZE / 8) as usize;
        match at - at % PAGE_SIZE {
            REQUEST_PAGE => w.words.get(Model::kept(word)).copied().unwrap_or(0),
            MAILBOX_PAGE if self.answers && word == stub::ANSWERS + ANSWERED as usize => ANSWER + 1,
            MAILBOX_PAGE => 0,
            _ => panic!("the stub reads {at:#x}"),
        }
    }

    fn write(w: &mut World, at: u64, value: u64) {
        assert_eq!(at - at % PAGE_SIZE, REQUEST_PAGE, "the stub writes {at:#x}");
        if let Some(word) = w.words.get_mut(Model::kept((at % PAGE_SIZE / 8) as usize)) {
            *word = value;
        }
    }

    fn get(w: &World, r: Register) -> u64 {
        match r {
            Register::RAX => w.rax,
            Register::RCX => w.rcx,
            Register::ECX => w.rcx & 0xffff_ffff,
            Register::CL => w.rcx & 0xff,
            Register::CH => w.rcx >> 8 & 0xff,
            Register::R11 => w.r11,
            Register::RSP => w.rsp,
            Register::R11D => w.r11 & 0xffff_ffff,
            Register::RDI | Register::RSI | Register::RDX | Register::R10 | Register::R8 | Register::R9 => 1,
            r => panic!("the stub uses {r:?}"),
        }
    }

    fn set(w: &mut World, r: Register, value: u64) {
        match r {
            Register::RAX => w.rax = value,
            Register::RCX => w.rcx = value,
            Register::ECX => w.rcx = value & 0xffff_ffff,
            Register::CL => w.rcx = w.rcx & !0xff | value & 0xff,
            Register::R11 => w.r11 = value,
            Register::RSP => w.rsp = value,
            Register::R11D => w.r11 = value & 0xffff_ffff,
            r => panic!("the stub changes {r:?}"),
        }
    }

    fn address(w: &World, i: &Instruction) -> u64 {
        if i.is_ip_rel_memory_operand() {
            return i.ip_rel_memory_address();
        }
        let part = |r| if r == Register::None { 0 } else { Model::get(w, r) };
        part(i.memory_base())
            .wrapping_add(part(i.memory_index()).wrapping_mul(i.memory_index_scale().into()))
            .wrapping_add(i.memory_displacement64())
    }

    fn operand(&self, w: &World, i: &Instruction, n: u32) -> u64 {
        match i.op_kind(n) {
            OpKind::Register => Model::get(w, i.op_register(n)),
            OpKind::Memory => self.read(w, Model::address(w, i)),
            _ => i.immediate(n),
        }
    }

    fn store(w: &mut World, i: &Instruction, n: u32, value: u64) {
        match i.op_kind(n) {
            OpKind::Memory => {
                let at = Model::address(w, i);
                Model::write(w, at, value);
            }
            _ => Model::set(w, i.op_register(n), value),
        }
    }

    /// One instruction of the program or of the stub.
    fn run(&self, w: &mut World) {
        if w.rip == RETURN {
            // SYSCALL, or a trampoline.
            let arrived = if self.direct { (self.stub.direct, 8) } else { (self.stub.entry, FLAGS) };
            (w.rip, w.rcx, w.r11) = (arrived.0, RETURN, arrived.1);
            return;
        }
        let i = self.code.get(&w.rip).expect("between instructions");
        w.rip = i.next_ip();
        match i.mnemonic() {
            Mnemonic::Pause | Mnemonic::Nop => {}
            Mnemonic::Mov if i.op0_register() == Register::R11D && i.op1_kind() != OpKind::Register => w.r11 = PATIENCE,
            Mnemonic::Mov | Mnemonic::Movzx => {
                let value = self.operand(w, i, 1);
                Model::store(w, i, 0, value);
            }
            Mnemonic::Lea => {
                let value = Model::address(w, i);
                Model::store(w, i, 0, value);
            }
            Mnemonic::Xchg => {
                let (a, b) = (self.operand(w, i, 0), self.operand(w, i, 1));
                Model::store(w, i, 0, b);
                Model::store(w, i, 1, a);
            }
            Mnemonic::Jrcxz if w.rcx == 0 => w.rip = i.near_branch_target(),
            Mnemonic::Jrcxz => {}
            Mnemonic::Jmp if i.op0_kind() == OpKind::Register => self.back(w),
            Mnemonic::Jmp => w.rip = i.near_branch_target(),
            Mnemonic::Sysretq => self.back(w),
            Mnemonic::Pushfq => {
                w.rsp -= 8;
                let at = w.rsp;
                Model::write(w, at, FLAGS);
            }
            Mnemonic::Pop => {
                let value = self.read(w, w.rsp);
                w.rsp += 8;
                Model::store(w, i, 0, value);
            }
            Mnemonic::Out => w.worker = Worker::Stopped { by_out: true },
            m => panic!("the model does not know {m:?}"),
        }
    }

    /// The program goes on after its call.
    fn back(&self, w: &mut World) {
        assert_eq!((w.rcx, w.r11), (RETURN, FLAGS), "{w:?}");
        self.finish(w);
    }

    fn finish(&self, w: &mut World) {
        assert_eq!(w.rsp, SP, "{w:?}");
        if self.number(w.call) == ANSWERED && w.rax == ANSWER {
            w.served[w.call as usize] += 1;
        } else {
            assert_eq!(w.rax, result(w.call), "{w:?}");
        }
        assert_eq!(w.served[w.call as usize], 1, "{w:?}");
        w.call += 1;
        self.begin(w);
    }

    fn execute(&self, w: &mut World, number: u64) {
        assert_eq!(number, self.number(w.call), "{w:?}");
        w.served[w.call as usize] += 1;
    }

    /// What `Guest::run` and `Guest::leave_stub` do, and the next entry.
    fn leave(&self, w: &mut World, by_out: bool) {
        let place = self.stub.place(w.rip);
        w.open = false;
        let served = w.answer.filter(|a| a.0 == w.words[stub::SEQUENCE]);
        if by_out {
            assert_eq!((w.rcx, w.r11), (RETURN, FLAGS), "{w:?}");
            self.execute(w, w.rax);
            w.rax = result(w.call);
            self.finish(w);
        } else if w.rip != RETURN {
            let served = served.filter(|_| place.requested || place.done);
            if place.arriving {
                w.r11 = FLAGS;
                if place.switched {
                    w.rsp = w.words[stub::RSP];
                }
            }
            if place.rcx_saved {
                w.rcx = w.words[stub::RCX];
            }
            if place.r11_saved {
                w.r11 = w.words[stub::R11];
            }
            if place.answered {
                w.rax = w.words[stub::ANSWER];
            }
            assert_eq!((w.rcx, w.r11), (RETURN, FLAGS), "{w:?}");
            if served.is_some() || place.done || place.answered {
                if let Some((_, result)) = served {
                    w.rax = result;
                }
            } else {
                self.execute(w, w.rax);
                w.rax = result(w.call);
            }
            self.finish(w);
        }
        w.worker = Worker::InGuest;
        w.words[stub::STATE] = state::FREE;
        (w.open, w.answer) = (true, None);
    }

    fn serve(&self, w: &World, next: &mut Vec<World>) {
        let mut to = |server, change: &dyn Fn(&mut World)| {
            let mut n = World { server, ..w.clone() };
            change(&mut n);
            next.push(n);
        };
        let nothing = |_: &mut World| {};
        match w.server {
            Server::Look if w.words[stub::STATE] == state::REQUESTED => to(Server::Lock, &nothing),
            Server::Look => {}
            // Only tried.
            Server::Lock if w.open && !w.locked => to(Server::Exchange, &|n| n.locked = true),
            Server::Lock => to(Server::Look, &nothing),
            Server::Exchange if w.words[stub::STATE] == state::REQUESTED => {
                to(Server::ReadCall, &|n| n.words[stub::STATE] = state::CLAIMED);
            }
            Server::Exchange => to(Server::Unlock, &nothing),
            Server::ReadCall => to(Server::ReadSequence { call: w.words[stub::CALL] }, &nothing),
            Server::ReadSequence { call } => to(Server::Serve { call, sequence: w.words[stub::SEQUENCE] }, &nothing),
            Server::Serve { call, sequence } => {
                to(Server::StoreState { end: Outcome::Refused }, &nothing);
                for end in [Outcome::Done, Outcome::Held] {
                    to(Server::StoreResult { call, end }, &|n| {
                        self.execute(n, call);
                        n.answer = Some((sequence, result(n.call)));
                        n.kicked |= end == Outcome::Held;
                    });
                }
            }
            Server::StoreResult { call: _, end } => {
                to(Server::StoreState { end }, &|n| n.words[stub::CALL] = w.answer.map_or(0, |a| a.1));
            }
            Server::StoreState { end } => to(Server::Unlock, &|n| {
                n.words[stub::STATE] = match end {
                    Outcome::Refused => state::REFUSED,
                    Outcome::Done => state::DONE,
                    Outcome::Held => state::HELD,
                }
            }),
            Server::Unlock => to(Server::Look, &|n| n.locked = false),
        }
    }

    fn next(&self, w: &World) -> Vec<World> {
        let mut next = Vec::new();
        if w.call == CALLS {
            return next;
        }
        match w.worker {
            Worker::InGuest => {
                let mut n = w.clone();
                self.run(&mut n);
                next.push(n);
                if w.kicked {
                    next.push(World { worker: Worker::Stopped { by_out: false }, kicked: false, ..w.clone() });
                }
            }
            // The gate is waited for.
            Worker::Stopped { by_out } if !w.locked => {
                let mut n = w.clone();
                self.leave(&mut n, by_out);
                next.push(n);
            }
            Worker::Stopped { .. } => {}
        }
        self.serve(w, &mut next);
        if w.kicks > 0 {
            next.push(World { kicked: true, kicks: w.kicks - 1, ..w.clone() });
        }
        if w.flips > 0 {
            let mut n = World { flips: w.flips - 1, ..w.clone() };
            n.words[stub::POLLED] ^= 1;
            next.push(n);
        }
        next
    }

    /// Visits every order of steps; gives the number of states.
    fn explore(&self) -> usize {
        let mut numbers = HashMap::from([(self.start(), 0_u32)]);
        let mut open = vec![self.start()];
        let mut before: Vec<Vec<u32>> = vec![Vec::new()];
        let mut ends = Vec::new();
        while let Some(w) = open.pop() {
            let me = numbers[&w];
            let next = self.next(&w);
            assert!(w.call == CALLS || !next.is_empty(), "nobody can go on: {w:?}");
            if w.call == CALLS {
                ends.push(me);
            }
            for n in next {
                let fresh = before.len() as u32;
                let number = *numbers.entry(n.clone()).or_insert(fresh);
                if number == fresh {
                    before.push(Vec::new());
                    open.push(n);
                }
                before[number as usize].push(me);
            }
        }
        // From every state the end can be reached: nobody waits for what cannot come.
        let mut reach: HashSet<u32> = ends.iter().copied().collect();
        while let Some(n) = ends.pop() {
            for &b in &before[n as usize] {
                if reach.insert(b) {
                    ends.push(b);
                }
            }
        }
        let stuck = numbers.iter().find(|(_, n)| !reach.contains(n));
        assert!(stuck.is_none(), "no way to the end: {stuck:?}");
        numbers.len()
    }
}

#[test]
fn each_call_is_made_once_in_whatever_order_the_sides_act() {
    let ways = [
        (TrapMode::Ring0, true, false),
        (TrapMode::Ring3, false, false),
        (TrapMode::Ring3, true, true),
        (TrapMode::Ring3, false, true),
    ];
    for (mode, answers, direct) in ways {
        let states = Model::new(mode, answers, direct).explore();
        println!("{mode}, answers {answers}, direct {direct}: {states} states");
        assert!(states > 1000);
    }
}
