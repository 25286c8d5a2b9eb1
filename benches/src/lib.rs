//! What the benches share: packets and tables with fixed seeds, a counting allocator, and the plain loop
//! that stays as it is, as a yardstick.

pub mod alloc;
pub mod memory;
pub mod packets;
pub mod plain;
pub mod rig;
pub mod table;
