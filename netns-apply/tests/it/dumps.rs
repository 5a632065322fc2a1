//! What `netfilter-state`'s tests have a kernel answer is what this kernel answers. Needs root. With `UPDATE_DUMPS=1` its answers take the place of those
//! recorded in `crates/netfilter-state/tests/dumps`.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::dumps::kernel_dumps;
use crate::common::{namespace, observe, run, soon, sorted_words};
use netfilter_state::{
    netlink::{Messages, NativeState, Observed, Question},
    ruleset::{HookedRules, TableFamily},
    steps::Transaction,
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};
use netns_apply::netlink::NftConnection;
use redirect_core::{Family, RulePlan, options::NativeForm};
use std::{env, fs};
use test_support::netns::{Families, Namespace};

const RESTORE: [(Family, &str); 2] =
    [(Family::V4, "iptables-nft-restore"), (Family::V6, "ip6tables-nft-restore")];

/// Every message of the kernel's answer to a question, as it came.
fn answer(socket: &Socket, question: Question<'_>) -> Vec<u8> {
    socket.send(&question.message(1), 0).unwrap();
    let mut whole = Vec::new();
    loop {
        let (datagram, _) = socket.recv_from_full().unwrap();
        // The end may come in one datagram with what it is the end of.
        whole.extend(&datagram);
        if let Some(end) = Messages::new(&datagram).find_map(|message| message.answer()) {
            assert_eq!(end.code, 0, "{end:?}");
            return whole;
        }
    }
}

/// All that the calling thread's network namespace holds, in the order it is read in.
fn dump() -> Vec<u8> {
    let socket = Socket::new(NETLINK_NETFILTER).unwrap();
    socket.connect(&SocketAddr::new(0, 0)).unwrap();
    let mut whole = [Question::Tables, Question::Sets].map(|asked| answer(&socket, asked)).concat();
    let mut ruleset = HookedRules::default();
    Messages::new(&whole).for_each(|message| ruleset.take(&message));
    for (family, table, set) in ruleset.sets() {
        whole.extend(answer(&socket, Question::Elements(family, &table, &set)));
    }
    let mut native = NativeState::default();
    Messages::new(&whole).for_each(|message| native.take(&message));
    for table in native.names() {
        whole.extend(answer(&socket, Question::Objects(TableFamily::Inet, table)));
    }
    for asked in [Question::Chains(None), Question::Rules] {
        whole.extend(answer(&socket, asked));
    }
    whole
}

fn text(name: &str) -> String {
    fs::read_to_string(kernel_dumps::file(name)).unwrap()
}

/// The other programs' rules for a family: those that both have, and its own.
fn scripts(family: Family) -> [String; 2] {
    let own = match family {
        Family::V4 => "others4.iptables",
        Family::V6 => "others6.iptables",
    };
    ["others.iptables", own].map(text)
}

fn of_others() -> Vec<u8> {
    run("nft", &["-f", "-"], &text("others.nft"));
    for (family, restore) in RESTORE {
        scripts(family).iter().for_each(|script| drop(run(restore, &["--noflush"], script)));
    }
    dump()
}

fn of_iptables(plan: &RulePlan) -> Vec<u8> {
    for (family, restore) in RESTORE {
        run(restore, &["--noflush"], &plan.rules(family).restore_text());
    }
    dump()
}

fn of_native(plan: &RulePlan, form: NativeForm) -> Vec<u8> {
    let transaction = Transaction { iptables: Vec::new(), native: Some(NativeState::wanted(plan, form)) };
    NftConnection::open().unwrap().commit(&transaction, &observe(), soon()).unwrap();
    dump()
}

/// What a dump says, whichever numbers the kernel gave to what is in it, and in whichever order it tells elements.
fn read(dump: &[u8]) -> (Vec<Vec<String>>, Observed) {
    let mut observed = Observed::at(1);
    Messages::new(dump).for_each(|message| observed.take(&message));
    (kernel_dumps::seen(&kernel_dumps::dumped(dump)).lines().map(sorted_words).collect(), observed)
}

/// Compares with what is recorded; records what is another.
fn compare(name: &str, dump: &[u8]) {
    let file = kernel_dumps::dump_file(name);
    let is_recorded = || fs::read(&file).is_ok_and(|recorded| says_the_same(dump, &recorded));
    if env::var_os("UPDATE_DUMPS").is_some() && !is_recorded() {
        fs::write(&file, dump).unwrap();
    }
    assert!(
        is_recorded(),
        "{name} is not what this kernel answers; run with UPDATE_DUMPS=1 and see what changes"
    );
}

/// Numbers that the kernel gives to what is in a dump aside.
fn says_the_same(one: &[u8], two: &[u8]) -> bool {
    let [(seen, one), (recorded, two)] = [one, two].map(read);
    seen == recorded && one.reads_like(&two)
}

#[test]
fn rules_of_others_are_dumped_as_recorded() {
    let dump = namespace().enter(of_others).unwrap();
    compare(kernel_dumps::OF_OTHERS, &dump);
}

/// What iptables-legacy-save prints of these scripts; counters aside, and the lines that say when.
fn saved(family: Family, scripts: &[String]) -> String {
    let [restore, save] = match family {
        Family::V4 => ["iptables-legacy-restore", "iptables-legacy-save"],
        Family::V6 => ["ip6tables-legacy-restore", "ip6tables-legacy-save"],
    };
    scripts.iter().for_each(|script| drop(run(restore, &["--noflush"], script)));
    let text = run(save, &[], "");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| format!("{}\n", line.split(" [").next().unwrap_or(line))).collect()
}

#[test]
fn rules_are_saved_as_recorded() {
    let others = (kernel_dumps::OF_OTHERS, Family::BOTH.map(|family| (family, scripts(family).to_vec())));
    let of_plan = |(name, plan): (&'static str, RulePlan)| {
        (name, Family::BOTH.map(|family| (family, vec![plan.rules(family).restore_text()])))
    };
    for (name, scripts) in kernel_dumps::plans().into_iter().map(of_plan).chain([others]) {
        let namespace = namespace();
        for (family, scripts) in scripts {
            let (file, saved) =
                (kernel_dumps::saved(name, family), namespace.enter(|| saved(family, &scripts)).unwrap());
            kernel_dumps::assert_recorded(&file, &saved);
        }
    }
}

#[test]
fn what_iptables_makes_of_plans_is_dumped_as_recorded() {
    for (name, plan) in kernel_dumps::plans() {
        compare(&kernel_dumps::of_iptables(name), &namespace().enter(|| of_iptables(&plan)).unwrap());
    }
}

#[test]
fn native_tables_are_dumped_as_recorded() {
    for (name, plan) in kernel_dumps::plans() {
        for form in [NativeForm::Plain, NativeForm::Sets] {
            compare(
                &kernel_dumps::of_native(name, form),
                &namespace().enter(|| of_native(&plan, form)).unwrap(),
            );
        }
    }
}

#[test]
fn native_tables_that_somebody_extended_are_dumped_as_recorded() {
    let dump = namespace().enter(|| {
        run("nft", &["-f", "-"], &text(&kernel_dumps::script(kernel_dumps::EXTENDED)));
        dump()
    });
    compare(kernel_dumps::EXTENDED, &dump.unwrap());
}

#[test]
fn tables_on_interfaces_are_dumped_as_recorded() {
    let dump = Namespace::pod(Families::Dual).unwrap().enter(|| {
        run("nft", &["-f", "-"], &text(&kernel_dumps::script(kernel_dumps::ON_DEVICES)));
        dump()
    });
    compare(kernel_dumps::ON_DEVICES, &dump.unwrap());
}

#[test]
fn what_nft_is_told_of_plans_is_what_is_recorded_and_makes_the_same_tables() {
    for (name, plan) in kernel_dumps::plans() {
        let script = kernel_dumps::file(&kernel_dumps::script(name));
        kernel_dumps::assert_recorded(&kernel_dumps::script(name), &plan.nft_text(NativeForm::Plain));
        let made = namespace().enter(|| {
            run("nft", &["-f", script.to_str().unwrap()], "");
            dump()
        });
        let recorded = kernel_dumps::dump(&kernel_dumps::of_native(name, NativeForm::Plain));
        assert_eq!(read(&made.unwrap()).0, read(&recorded).0, "{name}");
    }
}
