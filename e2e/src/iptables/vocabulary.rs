//! Every extension of iptables and every expression of nftables that the kernel and the programs of this machine know, in rules.

use std::collections::BTreeSet;

use test_support::dice::Dice;

/// Which of iptables and ip6tables take the words of a rule.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Programs {
    V4,
    V6,
    Both,
}
use Programs::{Both, V4, V6};

impl Programs {
    fn all(self) -> &'static [&'static str] {
        match self {
            V4 => &["iptables"],
            V6 => &["ip6tables"],
            Both => &["iptables", "ip6tables"],
        }
    }
}

/// Rules of iptables: a table, a chain and words. Those without a target may have any.
#[rustfmt::skip]
const EXTENSIONS: &[(Programs, &str, &str, &str)] = &[
    (Both, "mangle", "OUTPUT", "-m addrtype --dst-type UNICAST"),
    (V4, "mangle", "OUTPUT", "-p ah -m ah --ahspi 1"),
    (V6, "mangle", "OUTPUT", "-m ah --ahspi 1"),
    (Both, "mangle", "OUTPUT", "-m bpf --bytecode \"1,6 0 0 65535\""),
    (Both, "mangle", "OUTPUT", "-m cgroup --cgroup 1"),
    (Both, "mangle", "OUTPUT", "-m cluster --cluster-total-nodes 2 --cluster-local-node 1 --cluster-hash-seed 1"),
    (Both, "mangle", "OUTPUT", "-m comment --comment a"),
    (Both, "mangle", "OUTPUT", "-m connbytes --connbytes 0:100000 --connbytes-dir both --connbytes-mode bytes"),
    (Both, "mangle", "OUTPUT", "-m connlabel --label 1"),
    (Both, "mangle", "OUTPUT", "-m connlimit --connlimit-above 0"),
    (Both, "mangle", "OUTPUT", "-m connmark --mark 7"),
    (Both, "mangle", "OUTPUT", "-m conntrack --ctorigdstport 80"),
    (Both, "mangle", "OUTPUT", "-m cpu --cpu 0"),
    (Both, "mangle", "OUTPUT", "-p dccp -m dccp --dport 80"),
    (Both, "mangle", "OUTPUT", "-m devgroup --dst-group 0"),
    (Both, "mangle", "OUTPUT", "-m dscp --dscp 0"),
    (V4, "mangle", "OUTPUT", "-m ecn --ecn-ip-ect 0"),
    (Both, "mangle", "OUTPUT", "-p esp -m esp --espspi 1"),
    (V6, "mangle", "PREROUTING", "-m eui64"),
    (V6, "mangle", "OUTPUT", "-m frag --fragid 1"),
    (V6, "mangle", "OUTPUT", "-m hbh --hbh-len 8"),
    (V6, "mangle", "OUTPUT", "-m dst --dst-len 8"),
    (V6, "mangle", "OUTPUT", "-m hl --hl-eq 64"),
    (V6, "mangle", "OUTPUT", "-m ipv6header --soft --header auth"),
    (V6, "mangle", "OUTPUT", "-p 135 -m mh --mh-type 1"),
    (V6, "mangle", "OUTPUT", "-m rt --rt-type 0"),
    (V6, "mangle", "OUTPUT", "-m srh --srh-segs-left-eq 0"),
    (Both, "mangle", "OUTPUT", "-m hashlimit --hashlimit-above 1/sec --hashlimit-name h"),
    (Both, "mangle", "OUTPUT", "-m helper --helper ftp"),
    (V4, "mangle", "OUTPUT", "-p icmp -m icmp --icmp-type 8"),
    (V6, "mangle", "OUTPUT", "-p icmpv6 -m icmp6 --icmpv6-type 128"),
    (Both, "mangle", "OUTPUT", "-p ipcomp -m ipcomp --ipcompspi 1"),
    (V4, "mangle", "OUTPUT", "-m iprange --dst-range 10.0.0.0-250.0.0.0"),
    (V6, "mangle", "OUTPUT", "-m iprange --dst-range 2001::-fd00::ffff"),
    (Both, "mangle", "OUTPUT", "-m length --length 0:100"),
    (Both, "mangle", "OUTPUT", "-m limit --limit 5/sec"),
    (Both, "mangle", "PREROUTING", "-m mac --mac-source 02:00:00:00:00:01"),
    (Both, "mangle", "OUTPUT", "-m mark --mark 7"),
    (Both, "mangle", "OUTPUT", "-p tcp -m multiport --ports 80,15001"),
    (V4, "mangle", "PREROUTING", "-p tcp -m osf --genre Linux"),
    (Both, "mangle", "OUTPUT", "-m owner --socket-exists"),
    (Both, "mangle", "OUTPUT", "-m owner --gid-owner 1000 --suppl-groups"),
    (Both, "mangle", "POSTROUTING", "-m physdev ! --physdev-is-bridged"),
    (Both, "mangle", "OUTPUT", "-m pkttype --pkt-type unicast"),
    (Both, "mangle", "OUTPUT", "-m policy --dir out --pol none"),
    (Both, "mangle", "OUTPUT", "-m quota --quota 100000"),
    (V4, "mangle", "OUTPUT", "-m realm --realm 0"),
    (Both, "mangle", "OUTPUT", "-m recent --name r --set"),
    (Both, "mangle", "PREROUTING", "-m rpfilter --invert"),
    (Both, "mangle", "OUTPUT", "-p sctp -m sctp --dport 80"),
    (V4, "mangle", "OUTPUT", "-m set ! --match-set s4 dst"),
    (V6, "mangle", "OUTPUT", "-m set ! --match-set s6 dst"),
    (Both, "mangle", "PREROUTING", "-m socket --nowildcard"),
    (Both, "mangle", "PREROUTING", "-m socket --transparent --restore-skmark"),
    (Both, "mangle", "OUTPUT", "-m state --state NEW"),
    (Both, "mangle", "OUTPUT", "-m statistic --mode nth --every 2 --packet 0"),
    (Both, "mangle", "OUTPUT", "-m string --algo bm --string GET"),
    (Both, "mangle", "OUTPUT", "-p tcp -m tcp --tcp-option 2"),
    (Both, "mangle", "OUTPUT", "-p tcp -m tcpmss --mss 1:65535"),
    (Both, "mangle", "OUTPUT", "-m time --timestart 00:00 --timestop 23:59"),
    (Both, "mangle", "OUTPUT", "-m tos --tos 0"),
    (V4, "mangle", "OUTPUT", "-m ttl --ttl-eq 64"),
    (Both, "mangle", "OUTPUT", "-m u32 --u32 0=0:4294967295"),
    (Both, "mangle", "OUTPUT", "-p udp -m udp --dport 53"),
    (Both, "mangle", "OUTPUT", "-j AUDIT --type accept"),
    (Both, "mangle", "OUTPUT", "-p udp -j CHECKSUM --checksum-fill"),
    (Both, "mangle", "POSTROUTING", "-j CLASSIFY --set-class 1:1"),
    (Both, "mangle", "OUTPUT", "-j CONNMARK --set-mark 7"),
    (Both, "mangle", "OUTPUT", "-j CONNSECMARK --save"),
    (Both, "raw", "OUTPUT", "-j CT --ctevents new"),
    (Both, "raw", "OUTPUT", "-j CT --zone-orig 7"),
    (Both, "raw", "OUTPUT", "-j CT --zone-reply 7"),
    (Both, "mangle", "OUTPUT", "-j DSCP --set-dscp 1"),
    (V4, "nat", "OUTPUT", "-p tcp -j DNAT --to-destination 10.1.0.2:3128 --persistent"),
    (V4, "mangle", "OUTPUT", "-p tcp -j ECN --ecn-tcp-remove"),
    (Both, "mangle", "OUTPUT", "-j HMARK --hmark-tuple dport --hmark-mod 8 --hmark-offset 1 --hmark-rnd 1"),
    (Both, "mangle", "OUTPUT", "-j IDLETIMER --timeout 600 --label i"),
    (Both, "mangle", "OUTPUT", "-j LOG --log-prefix a"),
    (Both, "mangle", "OUTPUT", "-j MARK --set-mark 7"),
    (Both, "nat", "POSTROUTING", "-p tcp -j MASQUERADE --random"),
    (V4, "nat", "OUTPUT", "-d 198.51.100.0/24 -j NETMAP --to 10.1.0.0/24"),
    (V6, "nat", "OUTPUT", "-d 2001:db8::/64 -j NETMAP --to fd00:10::/64"),
    (Both, "mangle", "OUTPUT", "-j NFLOG --nflog-group 1"),
    (Both, "mangle", "OUTPUT", "-j NFQUEUE --queue-num 0 --queue-bypass"),
    (Both, "raw", "OUTPUT", "-j NOTRACK"),
    (Both, "mangle", "OUTPUT", "-j RATEEST --rateest-name e --rateest-interval 250ms --rateest-ewmalog 500ms"),
    (Both, "nat", "OUTPUT", "-p tcp -j REDIRECT --to-ports 3128-3129 --random"),
    (V4, "mangle", "OUTPUT", "-j SET --add-set s4 dst"),
    (V6, "mangle", "OUTPUT", "-j SET --add-set s6 dst --exist"),
    (V4, "mangle", "OUTPUT", "-j SET --map-set m4 src --map-mark"),
    (V4, "nat", "POSTROUTING", "-j SNAT --to-source 10.1.0.2"),
    (V6, "nat", "POSTROUTING", "-j SNAT --to-source fd00:10::2"),
    (V4, "nat", "INPUT", "-j SNAT --to-source 240.0.0.1"),
    (V6, "mangle", "POSTROUTING", "-d fd00:99::/64 -j SNPT --src-pfx fd00:10::/64 --dst-pfx fd00:11::/64"),
    (V6, "mangle", "PREROUTING", "-s fd00:99::/64 -j DNPT --src-pfx fd00:10::/64 --dst-pfx fd00:11::/64"),
    (Both, "filter", "INPUT", "-p tcp -j SYNPROXY --mss 1460 --wscale 7"),
    (Both, "mangle", "OUTPUT", "-p tcp --syn -j TCPMSS --set-mss 1200"),
    (Both, "mangle", "OUTPUT", "-p tcp -j TCPOPTSTRIP --strip-options timestamp"),
    (V4, "mangle", "OUTPUT", "-j TEE --gateway 10.1.0.77"),
    (V6, "mangle", "OUTPUT", "-j TEE --gateway fd00:10::77"),
    (Both, "mangle", "OUTPUT", "-j TOS --set-tos 0x10"),
    (Both, "mangle", "PREROUTING", "-p tcp -j TPROXY --on-port 9"),
    (Both, "raw", "OUTPUT", "-j TRACE"),
    (V4, "mangle", "OUTPUT", "-j TTL --ttl-set 3"),
    (V6, "mangle", "OUTPUT", "-j HL --hl-set 3"),
    (Both, "filter", "INPUT", "-p tcp -j REJECT"),
    (Both, "mangle", "OUTPUT", "-m rateest --rateest e --rateest-lt --rateest-bps 8"),
];

/// What no rule here has, and why.
pub const NOT_MADE: &[(&str, &str)] = &[
    ("ERROR", "it begins a chain of a legacy table"),
    ("standard", "every rule with a verdict is one"),
    ("NAT", "it is the library of SNAT, DNAT, MASQUERADE, NETMAP and REDIRECT"),
    ("udplite", "iptables writes no such match: packets here are of TCP or UDP"),
    ("l2tp", "iptables has no library for it"),
    ("nfacct", "it needs an object that no program of this machine makes"),
    ("SECMARK", "it needs a label of a security module"),
    ("CLUSTERIP", "no kernel has it any more"),
    ("ULOG", "no kernel has it any more"),
    ("LED", "this kernel does not have it"),
    ("ipvs", "this kernel does not have it"),
];

/// Objects and sets of a table in which rules of [`EXPRESSIONS`] stand.
const OBJECTS: &str = r#"
  counter n { }
  quota q { over 100 bytes }
  limit l { rate 5/second }
  ct helper h { type "ftp" protocol tcp; }
  ct timeout t { protocol tcp; l3proto ip; policy = { syn_sent: 0, established: 0 }
  }
  ct expectation e { protocol tcp; dport 80; timeout 10s; size 8; l3proto ip; }
  synproxy s { mss 1460; wscale 7; timestamp sack-perm; }
  set seen { type ipv4_addr; flags dynamic,timeout; timeout 1m; size 64; }
  set pairs { type ipv4_addr . inet_service; flags interval; elements = { 198.51.100.0-198.51.100.9 . 80-90, 10.0.0.0/8 . 8080 }; }
  set limited { type inet_service; limit rate 1/second burst 1 packets; elements = { 80, 8080 }; }"#;

/// Rules of nft: the family of a table, the type of a chain, its hooks, and words. A drop at the end may be another verdict.
#[rustfmt::skip]
const EXPRESSIONS: &[(&str, &str, &[&str], &str)] = &[
    ("inet", "filter", &["prerouting"], "fib saddr . iif oif missing drop"),
    ("inet", "filter", &["prerouting", "output"], "fib daddr type local accept"),
    ("inet", "filter", &["prerouting", "input"], "fib daddr . iif type local accept"),
    ("inet", "filter", &["output", "postrouting"], "rt ip nexthop 10.1.0.1 drop"),
    ("inet", "filter", &["output"], "rt ipsec missing drop"),
    ("inet", "filter", &["prerouting", "input"], "socket transparent 1 drop"),
    ("inet", "filter", &["prerouting", "input"], "socket mark 0 drop"),
    ("inet", "filter", &["prerouting", "input"], "socket wildcard 1 drop"),
    ("inet", "filter", &["prerouting", "input"], "osf name \"Linux\" drop"),
    ("inet", "filter", &["prerouting", "input"], "ipsec in reqid 1 drop"),
    ("inet", "filter", &["output", "postrouting"], "ipsec out reqid 1 drop"),
    ("inet", "filter", &["output"], "numgen inc mod 2 0 drop"),
    ("inet", "filter", &["output"], "numgen random mod 2 0 drop"),
    ("inet", "filter", &["output"], "numgen inc mod 2 vmap { 0 : drop, 1 : jump a }"),
    ("inet", "filter", &["output"], "jhash ip daddr . tcp dport mod 2 0 drop"),
    ("inet", "filter", &["output"], "symhash mod 2 0 drop"),
    ("inet", "filter", &["output"], "tcp option maxseg exists drop"),
    ("inet", "filter", &["output"], "tcp option maxseg size > 100 drop"),
    ("inet", "filter", &["output"], "tcp option timestamp missing drop"),
    ("inet", "filter", &["output"], "exthdr hbh exists drop"),
    ("ip", "filter", &["output"], "ip option rr exists drop"),
    ("inet", "filter", &["output"], "sctp chunk data exists drop"),
    ("inet", "filter", &["output"], "limit rate over 5/second drop"),
    ("inet", "filter", &["output"], "quota over 100 bytes drop"),
    ("inet", "filter", &["output"], "ct count over 0 drop"),
    ("inet", "filter", &["output"], "log prefix \"a\" level debug"),
    ("inet", "filter", &["output"], "meta length > 10 drop"),
    ("inet", "filter", &["input"], "meta pkttype host drop"),
    ("inet", "filter", &["output"], "meta priority 0 drop"),
    ("inet", "filter", &["output"], "meta cpu 0 drop"),
    ("inet", "filter", &["output"], "meta random > 0x80000000 drop"),
    ("inet", "filter", &["output"], "meta iifgroup 0 drop"),
    ("inet", "filter", &["output"], "meta oifgroup 0 drop"),
    ("inet", "filter", &["output"], "meta cgroup 0 drop"),
    ("inet", "filter", &["output"], "meta oiftype ether drop"),
    ("inet", "filter", &["output"], "meta time > \"2020-01-01 00:00:00\" drop"),
    ("inet", "filter", &["output"], "meta hour > \"00:01\" drop"),
    ("inet", "filter", &["output"], "meta day 1 drop"),
    ("inet", "filter", &["output"], "meta rtclassid 0 drop"),
    ("inet", "filter", &["output"], "meta oifkind \"veth\" drop"),
    ("inet", "filter", &["input"], "meta sdif 0 drop"),
    ("inet", "filter", &["output"], "meta mark > 0x10 drop"),
    ("inet", "filter", &["output"], "meta mark set meta mark << 3"),
    ("inet", "filter", &["output"], "ct mark set meta mark or 0x10 and 0xff"),
    ("inet", "filter", &["output"], "meta mark set ct mark xor 0x7"),
    ("inet", "filter", &["output"], "meta mark set jhash ip daddr mod 8"),
    ("inet", "filter", &["output"], "meta mark set numgen inc mod 8"),
    ("inet", "filter", &["output"], "meta mark set tcp dport map { 80 : 0x7, 0-79 : 0x1 }"),
    ("inet", "filter", &["output"], "meta priority set 1:1"),
    ("inet", "filter", &["output"], "meta nftrace set 1"),
    ("inet", "filter", &["output"], "ct status assured drop"),
    ("inet", "filter", &["output"], "ct status snat accept"),
    ("inet", "filter", &["output"], "ct expiration > 1s drop"),
    ("inet", "filter", &["output"], "ct helper \"ftp\" drop"),
    ("inet", "filter", &["output"], "ct l3proto ipv4 drop"),
    ("inet", "filter", &["output"], "ct protocol tcp drop"),
    ("inet", "filter", &["output"], "ct original ip daddr 198.51.100.1 drop"),
    ("inet", "filter", &["output"], "ct bytes > 0 drop"),
    ("inet", "filter", &["output"], "ct original packets 0 drop"),
    ("inet", "filter", &["output"], "ct avgpkt > 1 drop"),
    ("inet", "filter", &["output"], "ct label 1 drop"),
    ("inet", "filter", &["output"], "ct id 1 drop"),
    ("inet", "filter", &["output"], "ct zone 0 drop"),
    ("inet", "filter", &["output"], "ct state 0x80000000 accept"),
    ("inet", "filter", &["output"], "ct direction != reply drop"),
    ("inet", "filter", &["output", "prerouting"], "ct event set new"),
    ("inet", "filter", &["output"], "ct label set 1"),
    ("inet", "filter", &["output"], "ct original zone set 7"),
    ("inet", "filter", &["output"], "tcp dport set 8080"),
    ("inet", "filter", &["output"], "tcp flags set 0x12"),
    ("inet", "filter", &["output"], "ip ttl set 3"),
    ("inet", "filter", &["output"], "ip daddr set 10.1.0.2"),
    ("inet", "filter", &["output"], "ip dscp set 8"),
    ("inet", "filter", &["output"], "ip6 dscp set 8"),
    ("inet", "filter", &["output"], "ip6 hoplimit set 3"),
    ("inet", "filter", &["output"], "tcp option maxseg size set 1200"),
    ("inet", "filter", &["output"], "reset tcp option sack-perm"),
    ("inet", "filter", &["output"], "add @seen { ip daddr }"),
    ("inet", "filter", &["output"], "update @seen { ip daddr timeout 1s limit rate over 1/second } drop"),
    ("inet", "filter", &["output"], "delete @seen { ip daddr }"),
    ("inet", "filter", &["output"], "ip daddr @seen drop"),
    ("inet", "filter", &["output"], "ip daddr . tcp dport @pairs drop"),
    ("inet", "filter", &["output"], "ip daddr . tcp dport != @pairs drop"),
    ("inet", "filter", &["output"], "tcp dport @limited drop"),
    ("inet", "filter", &["output"], "counter name \"n\" drop"),
    ("inet", "filter", &["output"], "counter name tcp dport map { 80 : \"n\" } drop"),
    ("inet", "filter", &["output"], "quota name \"q\" drop"),
    ("inet", "filter", &["output"], "limit name \"l\" drop"),
    ("inet", "filter", &["output", "prerouting"], "tcp dport 80 ct helper set \"h\""),
    ("inet", "filter", &["output"], "meta l4proto tcp ct timeout set \"t\""),
    ("inet", "filter", &["output"], "meta l4proto tcp ct expectation set \"e\""),
    ("inet", "filter", &["input"], "synproxy name \"s\""),
    ("inet", "filter", &["input"], "synproxy name tcp dport map { 15006 : \"s\" }"),
    ("inet", "filter", &["input"], "tcp flags syn synproxy mss 1460 wscale 7"),
    ("ip", "filter", &["output"], "dup to 10.1.0.77"),
    ("netdev", "filter", &["ingress", "egress"], "tcp dport 80 fwd to \"lo\""),
    ("netdev", "filter", &["ingress", "egress"], "tcp dport 80 dup to \"lo\""),
    ("netdev", "filter", &["ingress"], "tcp dport 80 reject"),
    ("netdev", "filter", &["ingress"], "ip daddr 198.51.100.1 fwd ip to 10.1.0.77 device \"lo\""),
    ("inet", "filter", &["output"], "reject with icmpx admin-prohibited"),
    ("inet", "nat", &["output"], "dnat ip to tcp dport map { 80 : 10.1.0.2 }"),
    ("inet", "nat", &["output"], "dnat ip addr . port to tcp dport map { 80 : 10.1.0.2 . 3128 }"),
    ("inet", "nat", &["output"], "meta l4proto tcp redirect to :3128-3129 random,persistent"),
    ("inet", "nat", &["postrouting", "input"], "snat ip to 10.1.0.2 random"),
    ("inet", "nat", &["postrouting"], "masquerade random"),
    ("inet", "nat", &["postrouting"], "meta l4proto tcp masquerade to :2000-3000"),
    ("inet", "filter", &["prerouting"], "meta l4proto tcp tproxy to :9 accept"),
    ("inet", "filter", &["prerouting"], "tcp dport 80 tproxy ip to 127.0.0.1:3128 accept"),
    ("inet", "filter", &["output"], "notrack"),
    ("inet", "filter", &["output"], "iifname < \"zz\" drop"),
    ("inet", "filter", &["output"], "iif 0 drop"),
    ("inet", "filter", &["output"], "@th,16,8 0 drop"),
    ("inet", "filter", &["output"], "@nh,0,4 4 drop"),
    ("inet", "filter", &["output"], "@ih,0,16 0 drop"),
    ("inet", "filter", &["output"], "tcp dport & 0xff00 != 0x1 drop"),
    ("inet", "filter", &["output"], "ip daddr & 0.0.0.255 == 0.0.0.1 drop"),
    ("inet", "filter", &["output"], "ip daddr & 0.0.0.0 != 0.0.0.1 drop"),
    ("inet", "filter", &["output"], "tcp dport . ct direction vmap { 80 . original : drop, 443 . reply : jump a }"),
    ("inet", "filter", &["output"], "jump { tcp dport 80 drop; tcp dport 443 return; }"),
    ("inet", "filter", &["output"], "meta l4proto vmap { tcp : goto a, udp : continue } drop"),
    ("inet", "filter", &["output"], "tcp dport != { 0-79, 81-65535 } drop"),
    ("inet", "filter", &["output", "postrouting"], "rt mtu 100 drop"),
    ("inet", "filter", &["output"], "exthdr frag exists drop"),
    ("inet", "filter", &["output"], "meta l4proto tcp ct original proto-dst 80 drop"),
    ("inet", "nat", &["output"], "meta l4proto tcp dnat ip to 10.1.0.2:3128"),
    ("inet", "nat", &["output"], "meta l4proto tcp redirect to :tcp dport map { 80 : 3128 }"),
    ("inet", "filter", &["prerouting"], "meta pkttype set other"),
    ("inet", "filter", &["prerouting"], "ct zone set 7"),
];

/// The functions with which the kernel evaluates expressions (`nft_…_eval`) and words that lead to each.
pub const EVALUATED: &[(&str, &str)] = &[
    ("bitwise", "meta mark << 3"),
    ("byteorder", "meta mark > 0x10"),
    ("cmp", "iif 0"),
    ("connlimit", "ct count over 0"),
    ("counter", "counter name"),
    ("ct_expect_obj", "ct expectation set"),
    ("ct_helper_obj", "ct helper set"),
    ("ct_timeout_obj", "ct timeout set"),
    ("ct_get", "ct status assured"),
    ("ct_set", "ct event set"),
    ("ct_set_zone", "ct zone set"),
    ("dup_ipv4", "dup to 10.1.0.77"),
    ("dup_netdev", "dup to \"lo\""),
    ("dynset", "update @seen"),
    ("exthdr_ipv4", "ip option rr"),
    ("exthdr_ipv6", "exthdr hbh"),
    ("exthdr_sctp", "sctp chunk"),
    ("exthdr_tcp", "tcp option maxseg exists"),
    ("exthdr_tcp_set", "tcp option maxseg size set"),
    ("exthdr_tcp_strip", "reset tcp option"),
    ("fib", "fib saddr"),
    ("fib4", "fib saddr"),
    ("fib6", "fib saddr"),
    ("fwd_neigh", "fwd ip to"),
    ("fwd_netdev", "fwd to"),
    ("immediate", "accept"),
    ("jhash", "jhash"),
    ("limit", "limit rate"),
    ("log", "log prefix"),
    ("lookup", "@pairs"),
    ("masq", "masquerade"),
    ("meta_get", "meta cpu"),
    ("meta_set", "meta priority set"),
    ("nat", "snat ip to"),
    ("ng_inc", "numgen inc"),
    ("ng_random", "numgen random"),
    ("notrack", "notrack"),
    ("objref", "limit name"),
    ("objref_map", "counter name tcp dport map"),
    ("osf", "osf name"),
    ("payload", "@th,16,8"),
    ("payload_set", "tcp dport set"),
    ("quota", "quota over"),
    ("range", "ct original packets"),
    ("redir", "redirect to"),
    ("reject", "reject with"),
    ("reject_netdev", "tcp dport 80 reject"),
    ("rt_get", "rt mtu"),
    ("socket", "socket transparent"),
    ("symhash", "symhash"),
    ("synproxy", "synproxy mss"),
    ("tproxy", "tproxy to"),
    ("xfrm_get", "ipsec in"),
];

/// Those that no rule here has, and why.
pub const NOT_EVALUATED: &[(&str, &str)] = &[
    ("ct_get_fast", "ct_get, compiled otherwise"),
    ("dup_ipv6", "dup_ipv4 of the other family"),
    ("inner", "nft writes it from 1.0.7 on"),
    ("last", "nft writes it from 1.0.7 on"),
    ("match", "iptables writes it: every extension is one"),
    ("meta_inner", "nft writes it from 1.0.7 on"),
    ("payload_inner", "nft writes it from 1.0.7 on"),
    ("secmark_obj", "it needs a label of a security module"),
    ("tunnel", "nft 1.0.6 has no words for it"),
    ("tunnel_get", "nft 1.0.6 has no words for it"),
];

/// The names of extensions that rules here have.
pub fn extensions() -> BTreeSet<&'static str> {
    let words = EXTENSIONS.iter().flat_map(|(.., words)| {
        let words: Vec<&str> = words.split(' ').collect();
        let named = |two: &[&'static str]| matches!(two, ["-m" | "-j", _]).then(|| two[1]);
        words.windows(2).filter_map(named).collect::<Vec<_>>()
    });
    words.collect()
}

/// Whether a rule of nft here has these words.
pub fn has_words(piece: &str) -> bool {
    EXPRESSIONS.iter().any(|(.., words)| words.contains(piece))
}

/// Commands that make every rule, in a network namespace of their own.
pub fn every_rule() -> Vec<String> {
    let mut dice = Dice::new(1);
    let of_iptables = EXTENSIONS.iter().map(|rule| iptables(&mut dice, *rule, "nft"));
    let mut commands: Vec<String> = of_iptables.collect();
    for (number, (family, kind, hooks, words)) in EXPRESSIONS.iter().enumerate() {
        for hook in *hooks {
            let table = format!("every{number}{hook}");
            commands.push(nft(&table, (family, kind, hook, "lo"), -101, words));
        }
    }
    commands
}

/// One rule of either program, somewhere.
pub fn random(dice: &mut Dice, legacy: bool, number: usize) -> String {
    if dice.one_in(2) {
        let rule = dice.pick(EXTENSIONS);
        return iptables(dice, rule, if legacy { "legacy" } else { "nft" });
    }
    let (family, kind, hooks, words) = dice.pick(EXPRESSIONS);
    let hook = dice.pick(hooks);
    let priority = if kind == "nat" {
        dice.pick(&[-150, -110, -99, 50, 110])
    } else {
        dice.pick(&[-310, -201, -199, -150, -101, -90, 1, 90, 225])
    };
    let verdict = dice.pick(&["drop", "drop", "accept", "return", "meta mark set 7", "jump a"]);
    let words = words.strip_suffix("drop").map_or(words.to_owned(), |rest| format!("{rest}{verdict}"));
    let before = dice.pick(&[
        "",
        "",
        "counter ",
        "meta mark set 7 ",
        "ct mark set 0x17 ",
        "meta mark 0 ",
        "ct state new ",
        "meta cpu 0-63 ",
    ]);
    let device = dice.pick(&["lo", "eth0"]);
    let rule = |words: &str| nft(&format!("every{number}"), (family, kind, hook, device), priority, words);
    // Not everything may stand behind everything.
    format!("{} 2>/dev/null || {}\n", rule(&format!("{before}{words}")).trim_end(), rule(&words).trim_end())
}

fn iptables(
    dice: &mut Dice,
    (programs, table, chain, words): (Programs, &str, &str, &str),
    variant: &str,
) -> String {
    let mut script = String::new();
    for (set, made) in [("s4", "hash:ip"), ("s6", "hash:ip family inet6"), ("m4", "hash:ip skbinfo")] {
        if words.contains(set) {
            script.push_str(&format!("ipset -exist create {set} {made}\n"));
        }
    }
    if words.contains("m4") {
        script.push_str("ipset -exist add m4 10.1.0.2 skbmark 0x7\n");
    }
    let target = if words.contains("-j ") {
        ""
    } else {
        dice.pick(&[" -j ACCEPT", " -j RETURN", " -j MARK --set-mark 7"])
    };
    let table = if target.is_empty() || chain != "OUTPUT" {
        table
    } else {
        dice.pick(&["mangle", "raw", "nat", "filter"])
    };
    let place = dice.pick(&["-A", "-I"]);
    for program in programs.all() {
        if words.contains("--rateest e") {
            script.push_str(&format!("{program}-{variant} -w -t mangle -A INPUT -p 253 -j RATEEST --rateest-name e --rateest-interval 250ms --rateest-ewmalog 500ms\n"));
        }
        script.push_str(&format!("{program}-{variant} -w -t {table} {place} {chain} {words}{target}\n"));
    }
    script
}

fn nft(
    name: &str,
    (family, kind, hook, device): (&str, &str, &str, &str),
    priority: i32,
    words: &str,
) -> String {
    let (objects, device) =
        if family == "netdev" { ("", format!(" device {device}")) } else { (OBJECTS, String::new()) };
    format!(
        "nft '\ntable {family} {name} {{{objects}\n  chain a {{ counter accept; }}\n  chain c {{ type {kind} hook {hook}{device} priority {priority};\n    {words}\n  }}\n}}'\n"
    )
}
