//! Numbers of the kernel's interface: `linux/netlink.h`, `linux/netfilter/nfnetlink.h`, `nf_tables.h`, `nf_tables_compat.h`.

use crate::ruleset::TableFamily;
use redirect_core::{rule::Hook, values::Family};

/// Flags of a message (`nlmsg_flags`).
pub mod flags {
    /// It is a request.
    pub const REQUEST: u16 = 0x1;
    /// Success is to be confirmed, too.
    pub const ACK: u16 = 0x4;
    /// What is dumped changed while it was dumped.
    pub const DUMP_INTERRUPTED: u16 = 0x10;
    /// Everything is asked for.
    pub const DUMP: u16 = 0x300;
    /// It must not be there yet.
    pub const EXCLUSIVE: u16 = 0x200;
    /// It is to be created.
    pub const CREATE: u16 = 0x400;
    /// Behind the last one.
    pub const APPEND: u16 = 0x800;
    /// In an error message: the request is not repeated in it, only its header.
    pub const CAPPED: u16 = 0x100;
    /// In an error message: attributes with an explanation follow.
    pub const ACK_ATTRIBUTES: u16 = 0x200;
}

/// Types of messages (`nlmsg_type`).
pub mod kind {
    /// An error, or with code 0 a confirmation.
    pub const ERROR: u16 = 2;
    /// The end of a dump.
    pub const DONE: u16 = 3;
    /// The begin of a transaction.
    pub const BATCH_BEGIN: u16 = 0x10;
    /// The end of a transaction: it is committed.
    pub const BATCH_END: u16 = 0x11;

    /// A message of nf_tables (`enum nf_tables_msg_types`): the number of the subsystem, and its own.
    const fn of_nftables(number: u8) -> u16 {
        u16::from_be_bytes([10, number])
    }

    pub const NEW_TABLE: u16 = of_nftables(0);
    pub const GET_TABLE: u16 = of_nftables(1);
    pub const DELETE_TABLE: u16 = of_nftables(2);
    pub const NEW_CHAIN: u16 = of_nftables(3);
    pub const GET_CHAIN: u16 = of_nftables(4);
    pub const DELETE_CHAIN: u16 = of_nftables(5);
    pub const NEW_RULE: u16 = of_nftables(6);
    pub const GET_RULE: u16 = of_nftables(7);
    pub const DELETE_RULE: u16 = of_nftables(8);
    pub const NEW_SET: u16 = of_nftables(9);
    pub const GET_SET: u16 = of_nftables(10);
    pub const NEW_SET_ELEMENT: u16 = of_nftables(12);
    pub const GET_SET_ELEMENT: u16 = of_nftables(13);
    pub const NEW_GENERATION: u16 = of_nftables(15);
    pub const GET_GENERATION: u16 = of_nftables(16);
    pub const NEW_OBJECT: u16 = of_nftables(18);
    pub const GET_OBJECT: u16 = of_nftables(19);
    /// Asks whether an xt match or target exists.
    pub const GET_COMPAT: u16 = 11 << 8;
    /// Asks for what hangs on a hook, and the type of the answers (`NFNL_MSG_HOOK_GET`).
    pub const HOOKS: u16 = 12 << 8;
    /// Destroys a set of ipset (`IPSET_CMD_DESTROY`).
    pub const DESTROY_IPSET: u16 = u16::from_be_bytes([6, 3]);
}

/// Number of the nf_tables subsystem, which a transaction is addressed to.
pub const NFTABLES: u16 = 10;

/// Families (`nfgen_family`).
pub mod family {
    pub const UNSPECIFIED: u8 = 0;
    pub const INET: u8 = 1;
    pub const IPV4: u8 = 2;
    pub const NETDEV: u8 = 5;
    pub const IPV6: u8 = 10;
}

/// The family with this number.
pub fn family_of(number: u8) -> Option<Family> {
    Family::BOTH.into_iter().find(|family| family.number() == number)
}

/// The family of tables with this number.
pub fn table_family(number: u8) -> Option<TableFamily> {
    let all = [TableFamily::Inet, TableFamily::Ip, TableFamily::Netdev, TableFamily::Ip6];
    all.into_iter().find(|of| table_family_number(*of) == number)
}

/// The number of a family of tables.
pub const fn table_family_number(of: TableFamily) -> u8 {
    match of {
        TableFamily::Inet => family::INET,
        TableFamily::Ip => family::IPV4,
        TableFamily::Netdev => family::NETDEV,
        TableFamily::Ip6 => family::IPV6,
    }
}

/// Attributes, by the message or object they belong to.
pub mod attribute {
    /// The name of a table, in its own message and in those about what it holds.
    pub const TABLE: u16 = 1;
    /// An element of a list.
    pub const ELEMENT: u16 = 1;
    /// The generation of the ruleset that a transaction is based on.
    pub const BATCH_GENERATION: u16 = 1;
    /// The kernel's words in an error message.
    pub const ERROR_TEXT: u16 = 1;
    /// The number of a program that hangs on a hook.
    pub const HOOKED_PROGRAM: u16 = 1;
    /// The length of a part of a set's keys.
    pub const PART_LENGTH: u16 = 1;

    pub mod generation {
        pub const ID: u16 = 1;
        pub const PROCESS: u16 = 2;
        pub const PROCESS_NAME: u16 = 3;
    }
    pub mod table {
        pub const FLAGS: u16 = 2;
        pub const OWNER: u16 = 7;
    }
    /// `linux/netfilter/ipset/ip_set.h`
    pub mod ipset {
        pub const PROTOCOL: u16 = 1;
        pub const NAME: u16 = 2;
    }
    pub mod chain {
        pub const HANDLE: u16 = 2;
        pub const NAME: u16 = 3;
        pub const HOOK: u16 = 4;
        pub const POLICY: u16 = 5;
        pub const USE: u16 = 6;
        pub const TYPE: u16 = 7;
    }
    pub mod hook {
        pub const NUMBER: u16 = 1;
        pub const PRIORITY: u16 = 2;
        pub const DEVICE: u16 = 3;
        pub const DEVICES: u16 = 4;
    }
    /// Of a chain that hangs on interfaces (`enum nft_devices_attributes`).
    pub mod device {
        pub const NAME: u16 = 1;
        /// What the names of several begin with (Linux 6.18).
        pub const PREFIX: u16 = 2;
    }
    /// Of one that hangs on a hook (`linux/netfilter/nfnetlink_hook.h`).
    pub mod hooked {
        pub const HOOK: u16 = 1;
        pub const PRIORITY: u16 = 2;
        pub const FUNCTION: u16 = 4;
        pub const MODULE: u16 = 5;
        pub const INFO: u16 = 6;
    }
    pub mod hooked_info {
        pub const DESCRIPTION: u16 = 1;
        pub const TYPE: u16 = 2;
    }
    pub mod hooked_chain {
        pub const TABLE: u16 = 1;
        pub const FAMILY: u16 = 2;
        pub const NAME: u16 = 3;
    }
    pub mod rule {
        pub const CHAIN: u16 = 2;
        pub const HANDLE: u16 = 3;
        pub const EXPRESSIONS: u16 = 4;
        pub const COMPAT: u16 = 5;
        pub const POSITION: u16 = 6;
        pub const USER_DATA: u16 = 7;
    }
    pub mod compat {
        pub const PROTOCOL: u16 = 1;
        pub const FLAGS: u16 = 2;
    }
    pub mod expression {
        pub const NAME: u16 = 1;
        pub const DATA: u16 = 2;
    }
    pub mod data {
        pub const VALUE: u16 = 1;
        pub const VERDICT: u16 = 2;
    }
    pub mod verdict {
        pub const CODE: u16 = 1;
        pub const CHAIN: u16 = 2;
    }
    pub mod immediate {
        pub const REGISTER: u16 = 1;
        pub const DATA: u16 = 2;
    }
    pub mod meta {
        pub const DESTINATION: u16 = 1;
        pub const KEY: u16 = 2;
        pub const SOURCE: u16 = 3;
    }
    pub mod ct {
        pub const DESTINATION: u16 = 1;
        pub const KEY: u16 = 2;
        pub const DIRECTION: u16 = 3;
        pub const SOURCE: u16 = 4;
    }
    pub mod payload {
        pub const DESTINATION: u16 = 1;
        pub const BASE: u16 = 2;
        pub const OFFSET: u16 = 3;
        pub const LENGTH: u16 = 4;
        pub const SOURCE: u16 = 5;
        pub const CHECKSUM_TYPE: u16 = 6;
        pub const CHECKSUM_OFFSET: u16 = 7;
        pub const CHECKSUM_FLAGS: u16 = 8;
    }
    pub mod bitwise {
        pub const SOURCE: u16 = 1;
        pub const DESTINATION: u16 = 2;
        pub const LENGTH: u16 = 3;
        pub const MASK: u16 = 4;
        pub const XOR: u16 = 5;
        pub const OPERATION: u16 = 6;
    }
    pub mod cmp {
        pub const REGISTER: u16 = 1;
        pub const OPERATOR: u16 = 2;
        pub const DATA: u16 = 3;
    }
    pub mod range {
        pub const REGISTER: u16 = 1;
        pub const OPERATOR: u16 = 2;
        pub const FROM: u16 = 3;
        pub const TO: u16 = 4;
    }
    pub mod counter {
        pub const BYTES: u16 = 1;
        pub const PACKETS: u16 = 2;
    }
    /// Of an xt match, an xt target and a question for one.
    pub mod xt {
        pub const NAME: u16 = 1;
        pub const REVISION: u16 = 2;
        pub const INFO: u16 = 3;
        pub const TYPE: u16 = 3;
    }
    pub mod redir {
        pub const FIRST_PORT: u16 = 1;
        pub const LAST_PORT: u16 = 2;
        pub const FLAGS: u16 = 3;
    }
    pub mod nat {
        pub const TYPE: u16 = 1;
        pub const FAMILY: u16 = 2;
        pub const FIRST_ADDRESS: u16 = 3;
        pub const LAST_ADDRESS: u16 = 4;
    }
    pub mod tproxy {
        pub const FAMILY: u16 = 1;
        pub const PORT: u16 = 3;
    }
    pub mod lookup {
        pub const SET: u16 = 1;
        pub const SOURCE: u16 = 2;
        pub const DESTINATION: u16 = 3;
        pub const SET_ID: u16 = 4;
        pub const FLAGS: u16 = 5;
    }
    pub mod object_reference {
        pub const TYPE: u16 = 1;
        pub const SET: u16 = 4;
        pub const SET_ID: u16 = 5;
    }
    pub mod byteorder {
        pub const SOURCE: u16 = 1;
        pub const DESTINATION: u16 = 2;
        pub const OPERATION: u16 = 3;
        pub const LENGTH: u16 = 4;
        pub const SIZE: u16 = 5;
    }
    pub mod fib {
        pub const DESTINATION: u16 = 1;
        pub const RESULT: u16 = 2;
        pub const FLAGS: u16 = 3;
    }
    pub mod dynamic_set {
        pub const SET: u16 = 1;
        pub const SET_ID: u16 = 2;
        pub const OPERATION: u16 = 3;
        pub const KEY: u16 = 4;
    }
    /// Of an expression that reads or writes an extension header, or an option of TCP.
    pub mod extension_header {
        pub const TYPE: u16 = 2;
        pub const OFFSET: u16 = 3;
        pub const LENGTH: u16 = 4;
        pub const OPERATION: u16 = 6;
        pub const SOURCE: u16 = 7;
        pub const DESTINATION: u16 = 1;
    }
    pub mod set {
        pub const NAME: u16 = 2;
        pub const FLAGS: u16 = 3;
        pub const KEY_TYPE: u16 = 4;
        pub const KEY_LENGTH: u16 = 5;
        pub const DATA_TYPE: u16 = 6;
        pub const DATA_LENGTH: u16 = 7;
        pub const POLICY: u16 = 8;
        pub const DESCRIPTION: u16 = 9;
        pub const ID: u16 = 10;
        pub const TIMEOUT: u16 = 11;
        pub const GC_INTERVAL: u16 = 12;
        pub const USER_DATA: u16 = 13;
        pub const OBJECT_TYPE: u16 = 15;
        pub const EXPRESSION: u16 = 17;
        pub const EXPRESSIONS: u16 = 18;
        /// What one may be created with; the rest is for reading only.
        pub const WRITABLE: [u16; 13] = [
            FLAGS,
            KEY_TYPE,
            KEY_LENGTH,
            DATA_TYPE,
            DATA_LENGTH,
            POLICY,
            DESCRIPTION,
            TIMEOUT,
            GC_INTERVAL,
            USER_DATA,
            OBJECT_TYPE,
            EXPRESSION,
            EXPRESSIONS,
        ];
    }
    pub mod set_description {
        pub const SIZE: u16 = 1;
        /// The parts of a key, one behind the other.
        pub const PARTS: u16 = 2;
    }
    pub mod elements {
        pub const SET: u16 = 2;
        pub const ELEMENTS: u16 = 3;
        pub const SET_ID: u16 = 4;
    }
    pub mod element {
        pub const KEY: u16 = 1;
        pub const DATA: u16 = 2;
        pub const FLAGS: u16 = 3;
        pub const TIMEOUT: u16 = 4;
        /// In how many milliseconds it goes.
        pub const EXPIRATION: u16 = 5;
        pub const USER_DATA: u16 = 6;
        pub const EXPRESSION: u16 = 7;
        pub const OBJECT: u16 = 9;
        pub const KEY_END: u16 = 10;
        pub const EXPRESSIONS: u16 = 11;
        /// What one may be created with.
        pub const WRITABLE: [u16; 9] =
            [KEY, DATA, FLAGS, TIMEOUT, USER_DATA, EXPRESSION, OBJECT, KEY_END, EXPRESSIONS];
    }
    pub mod object {
        pub const NAME: u16 = 2;
        pub const TYPE: u16 = 3;
        pub const DATA: u16 = 4;
        pub const USER_DATA: u16 = 8;
        /// What one may be created with.
        pub const WRITABLE: [u16; 4] = [NAME, TYPE, DATA, USER_DATA];
    }
}

/// What hangs on a hook (`enum nfnl_hook_chaintype`).
pub mod hooked {
    pub const CHAIN: u32 = 1;
    pub const PROGRAM: u32 = 2;
}

/// Hooks of interfaces: those of family netdev, and the one that family inet has besides those of IP.
pub mod device_hook {
    pub const INGRESS: u32 = 0;
    pub const EGRESS: u32 = 1;
    pub const INET_INGRESS: u32 = 5;
}

/// Protocols of a packet of a link (`linux/if_ether.h`).
pub mod ethertype {
    pub const IPV4: [u8; 2] = [0x08, 0x00];
    pub const IPV6: [u8; 2] = [0x86, 0xdd];
}

/// Keys of the meta expression.
pub mod meta {
    pub const LENGTH: u32 = 0;
    pub const ETHERTYPE: u32 = 1;
    pub const PRIORITY: u32 = 2;
    pub const MARK: u32 = 3;
    pub const IN_INDEX: u32 = 4;
    pub const OUT_INDEX: u32 = 5;
    pub const IN_INTERFACE: u32 = 6;
    pub const OUT_INTERFACE: u32 = 7;
    pub const SOCKET_USER: u32 = 10;
    pub const SOCKET_GROUP: u32 = 11;
    pub const TRACE: u32 = 12;
    pub const SECURITY_MARK: u32 = 14;
    pub const FAMILY: u32 = 15;
    pub const PROTOCOL: u32 = 16;
    pub const PROCESSOR: u32 = 20;
    pub const RANDOM: u32 = 24;
}

/// Keys of the ct expression.
pub mod ct {
    pub const STATE: u32 = 0;
    pub const DIRECTION: u32 = 1;
    pub const STATUS: u32 = 2;
    pub const MARK: u32 = 3;
    pub const SECURITY_MARK: u32 = 4;
    pub const LABELS: u32 = 13;
    pub const ZONE: u32 = 17;
    pub const EVENTS: u32 = 18;
    pub const ID: u32 = 23;
}

/// Bits of the status of a connection (`IPS_SRC_NAT`, `IPS_DST_NAT`).
pub mod status {
    pub const SOURCE_TRANSLATED: u32 = 0x10;
    pub const DESTINATION_TRANSLATED: u32 = 0x20;
}

/// Operations of the exthdr expression, and the option of TCP for the size of segments.
pub mod extension_header {
    pub const TCP_OPTION: u32 = 1;
    pub const SEGMENT_SIZE: u8 = 2;
    /// Where the size stands in it, and how many bytes it is.
    pub const PLACE_OF_SIZE: (Option<u32>, Option<u32>) = (Some(2), Some(2));
}

/// Directions of the ct expression (`ip_conntrack_dir`).
pub mod direction {
    pub const ORIGINAL: u8 = 0;
    pub const REPLY: u8 = 1;
}

/// Where the payload expression counts from.
pub mod base {
    pub const NETWORK: u32 = 1;
    pub const TRANSPORT: u32 = 2;
}

/// Operators of the cmp and range expressions.
pub mod operator {
    pub const EQUAL: u32 = 0;
    pub const NOT_EQUAL: u32 = 1;
}

/// Registers.
pub mod register {
    pub const VERDICT: u32 = 0;
    pub const FIRST: u32 = 1;
    /// The first of those that hold four bytes; they are parts of those before, which hold sixteen.
    pub const FIRST_PART: u32 = 8;
}

/// The operation of the byteorder expression that makes the network's order of the machine's (`NFT_BYTEORDER_HTON`).
pub const TO_NETWORK_ORDER: u32 = 1;

/// Of the fib expression: what it returns, and which address it is about.
pub mod fib {
    pub const ADDRESS_TYPE: u32 = 3;
    pub const SOURCE: u32 = 1;
    pub const DESTINATION: u32 = 2;
}

/// Types of stateful objects (`NFT_OBJECT_*`).
pub mod object {
    pub const COUNTER: u32 = 1;
    pub const QUOTA: u32 = 2;
    pub const LIMIT: u32 = 4;
    pub const CONNECTION_LIMIT: u32 = 5;
    pub const SECURITY_MARK: u32 = 8;
    pub const SYNPROXY: u32 = 10;
}

/// Verdicts.
pub mod verdict {
    /// On with the next expression.
    pub const CONTINUE: u32 = 0xffff_ffff;
    pub const DROP: u32 = 0;
    pub const ACCEPT: u32 = 1;
    pub const JUMP: u32 = 0xffff_fffd;
    pub const RETURN: u32 = 0xffff_fffb;
}

/// Flags of sets and their elements.
pub mod set {
    pub const ANONYMOUS: u32 = 1;
    pub const CONSTANT: u32 = 2;
    pub const INTERVAL: u32 = 4;
    /// Its elements go by themselves.
    pub const TIMEOUT: u32 = 0x10;
    /// Rules add elements, and remove them.
    pub const CHANGED_BY_RULES: u32 = 0x20;
    /// Its intervals are those of each part of a key.
    pub const OF_PARTS: u32 = 0x80;
    /// Of an element: an interval ends before it.
    pub const END_OF_INTERVAL: u32 = 1;
    /// Of an element: it stands for all keys that no other has.
    pub const CATCH_ALL: u32 = 2;
}

/// What a rule does with an element of a set (`NFT_DYNSET_OP_*`); removal came with Linux 5.4.
pub mod dynamic_set {
    pub const ADD: u32 = 0;
    pub const DELETE: u32 = 2;
}

/// How nft names the type of a set's keys.
pub mod key_type {
    pub const IPV4_ADDRESS: u32 = 7;
    pub const IPV6_ADDRESS: u32 = 8;
    pub const PORT: u32 = 13;
    /// How far the types of a key's earlier parts are shifted by each later one.
    pub const BITS: u32 = 6;
}

/// How IPv4's own checksum is corrected (`NFT_PAYLOAD_CSUM_INET`), and where in the header it is.
pub const HEADER_CHECKSUM: (u32, u32) = (1, 10);
/// A port range is given (`NF_NAT_RANGE_PROTO_SPECIFIED`).
pub const PORTS_GIVEN: u32 = 2;
/// A table whose chains are not on their hooks (`NFT_TABLE_F_DORMANT`).
pub const DORMANT: u32 = 1;
/// A table that belongs to the socket that made it, and ends with it (`NFT_TABLE_F_OWNER`, Linux 5.12).
pub const OWNED_BY_SOCKET: u32 = 2;
/// The policy of every base chain (`NF_ACCEPT`).
pub const POLICY_ACCEPT: u32 = 1;

/// The kernel's number of a hook.
pub const fn hook_number(hook: Hook) -> u32 {
    match hook {
        Hook::Prerouting => 0,
        Hook::Input => 1,
        Hook::Forward => 2,
        Hook::Output => 3,
        Hook::Postrouting => 4,
    }
}

/// The hook of IP with this number.
pub fn hook_of(number: u32) -> Option<Hook> {
    Hook::ALL.iter().copied().find(|hook| hook_number(*hook) == number)
}

/// The name of a set that belongs to one rule; the kernel puts a number in.
pub const ANONYMOUS_SET: &str = "__set%d";
